from peagle.data.prompts import make_prompt
from peagle.data.refusals import RefusalFile, read_refused
from peagle.data.request_queue import Refusal

PROMPTS = [make_prompt("t", [f"Question {i} please"]) for i in range(4)]


def test_lines_of_all_processes_are_read(tmp_path):
    RefusalFile(tmp_path).add(PROMPTS[0], 0.0, 1, Refusal(400, "no\u2028\nway \ud800"))
    RefusalFile(tmp_path, "1of2").add(PROMPTS[1], 0.8, 2, Refusal(None, "unknown"))
    RefusalFile(tmp_path, "1of2").add(PROMPTS[1], 0.0, 2, Refusal(None, "unknown"))
    assert RefusalFile(tmp_path, "2of2").before == {PROMPTS[0].prompt_id: {0.0}, PROMPTS[1].prompt_id: {0.0, 0.8}}


def test_asking_again_forgets(tmp_path):
    for prefix, prompt in (("", PROMPTS[0]), ("1of2", PROMPTS[1]), ("2of2", PROMPTS[2])):
        RefusalFile(tmp_path, prefix).add(prompt, 0.0, 1, Refusal(400, "no"))
    assert RefusalFile(tmp_path, "1of2", ask_again=True).before == {}
    assert set(read_refused(tmp_path)) == {PROMPTS[0].prompt_id, PROMPTS[2].prompt_id}
    RefusalFile(tmp_path, ask_again=True)
    assert read_refused(tmp_path) == {}


def test_a_line_that_was_cut_short(tmp_path):
    file = RefusalFile(tmp_path)
    for prompt in PROMPTS[:2]:
        file.add(prompt, 0.0, 1, Refusal(400, "no"))
    file.path.write_bytes(file.path.read_bytes()[:-20])
    assert set(read_refused(tmp_path)) == {PROMPTS[0].prompt_id}
    file.add(PROMPTS[2], 0.0, 1, Refusal(400, "no"))
    assert set(read_refused(tmp_path)) == {PROMPTS[0].prompt_id, PROMPTS[2].prompt_id}
