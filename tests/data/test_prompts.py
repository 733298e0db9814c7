import json
import sys
import types

import pytest

from peagle.data.prompts import TEMPLATES, load_prompts, make_prompt, parse_source, turns_of
from peagle.errors import InputError

FORMS = [
    ({"question_id": 81, "category": "writing", "turns": ["First.", "Second."]}, None, ["First.", "Second."]),
    ({"task_id": "HumanEval/0", "prompt": "def f():\n", "entry_point": "f"}, None, ["def f():\n"]),
    ({"question": "How many?", "answer": "#### 3"}, None, ["How many?"]),
    ({"instruction": "Translate.", "input": "Haus", "response": "house"}, None, ["Translate.\n\nHaus"]),
    ({"instruction": "Say hi.", "input": "", "output": "hi"}, None, ["Say hi."]),
    (
        {"id": "seed_task_1", "instruction": "Relate.", "instances": [{"input": "Night : Day", "output": "x"}]},
        None,
        ["Relate.\n\nNight : Day"],
    ),
    ({"instruction": "Name one.", "instances": [{"input": "<noinput>", "output": "x"}]}, None, ["Name one."]),
    (
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": "Hello"},
                {"role": "user", "content": [{"type": "text", "text": "Bye"}]},
            ]
        },
        "Be brief.",
        ["Hi", "Bye"],
    ),
    ({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}, None, ["Hi"]),
    ({"text": "Once"}, None, ["Once"]),
]


@pytest.mark.parametrize(("row", "system", "turns"), FORMS)
def test_published_forms(row, system, turns):
    assert turns_of(row, "f:1") == (system, turns)


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_field_names_one(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"prompt": "no", "ask": "yes"}])
    assert load_prompts([f"{path}:field=ask"])[0].turns == ("yes",)
    with pytest.raises(InputError, match=r"a\.jsonl:1: no field 'other'; the row has 'prompt', 'ask'"):
        load_prompts([f"{path}:field=other"])


@pytest.mark.parametrize(
    "row", [{"foo": 1}, {"prompt": "  "}, {"prompt": 3}, {"turns": []}, {"messages": [{"role": "tool"}]}]
)
def test_unusable_row_is_named(tmp_path, row):
    path = write(tmp_path / "a.jsonl", [{"prompt": "fine"}, row])
    with pytest.raises(InputError, match=r"a\.jsonl:2"):
        load_prompts([path])


HALF = "half \ud83d"


@pytest.mark.parametrize(
    ("row", "field"),
    [
        ({"prompt": HALF}, "prompt"),
        ({"turns": ["fine", HALF]}, "turns"),
        ({"messages": [{"role": "system", "content": HALF}, {"role": "user", "content": "fine"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": HALF}]}]}, "messages"),
        ({"conversations": [{"from": "human", "value": "\ude00 other half"}]}, "conversations"),
        ({"instruction": HALF}, "instruction"),
        ({"instruction": "fine", "input": HALF}, "input"),
    ],
)
def test_half_a_character_is_named(tmp_path, row, field):
    path = write(tmp_path / "a.jsonl", [{"prompt": "a whole one: \U0001f600", "answer": HALF}, row])
    with pytest.raises(InputError, match=rf"a\.jsonl:2: field '{field}': holds half a character \('\\ud"):
        load_prompts([path])
    assert load_prompts([f"{path}:limit=1:where=answer={HALF}"])[0].turns == ("a whole one: \U0001f600",)


def test_ids_depend_on_source_and_content_only(tmp_path):
    first = write(tmp_path / "a.jsonl", [{"prompt": "x"}, {"prompt": "y"}, {"prompt": "x"}])
    (tmp_path / "sub").mkdir()
    second = write(tmp_path / "sub" / "a.jsonl", [{"prompt": "y"}, {"prompt": "x"}])
    one, two = load_prompts([first]), load_prompts([second])
    assert len(one) == 2, "a repeated prompt counts once"
    assert {p.prompt_id for p in one} == {p.prompt_id for p in two}
    assert make_prompt("b", ["x"]).prompt_id != make_prompt("a", ["x"]).prompt_id


def test_options_that_would_change_nothing_are_refused(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"prompt": "x"}])
    with pytest.raises(InputError, match="config=main: only for a hub: data set"):
        load_prompts([f"{path}:config=main"])
    for spec in (f"{path}:field=prompt:transform=python_stub", "hub:o/n:train:prompt:transform=python_stub"):
        with pytest.raises(InputError, match="field=prompt beside transform=python_stub"):
            load_prompts([spec])
    assert parse_source("hub:o/n:config=main").config == "main"


def test_prompts_know_their_place(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"prompt": f"{i}"} for i in range(4)])
    assert [prompt.place for prompt in load_prompts([path])] == [f"{path}:{i}" for i in (1, 2, 3, 4)]
    assert [prompt.place for prompt in load_prompts([f"{path}:join=2"])] == [f"{path}:1", f"{path}:3"]


def test_limit_is_a_fixed_nested_choice(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"prompt": f"prompt {i}"} for i in range(50)])
    small, large = load_prompts([f"{path}:limit=10"]), load_prompts([f"{path}:limit=20"])
    assert len(small) == 10
    assert set(small) < set(large)
    assert [p.turns for p in small] != [(f"prompt {i}",) for i in range(10)]


def test_join_makes_long_conversations(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps({"turns": [f"a{i}", f"b{i}"]}) + "\n" for i in range(5)))
    turns = [prompt.turns for prompt in load_prompts([f"{path}:join=2"])]
    assert turns == [("a0", "b0", "a1", "b1"), ("a2", "b2", "a3", "b3"), ("a4", "b4")]
    assert load_prompts([f"{path}:join=1"]) == load_prompts([str(path)])
    assert len(load_prompts([f"{path}:join=2:limit=1"])) == 1


def test_where_name_and_templates(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"prompt": "puts 1", "language": "ruby"}, {"prompt": "x", "language": "go"}])
    prompts = load_prompts([rf"{path}:where=language=ruby:name=rb:template=Do: it\n{{prompt}}"])
    assert [(p.source, p.turns) for p in prompts] == [("rb", ("Do: it\nputs 1",))]
    (tmp_path / "t.txt").write_text("<<{prompt}>>")
    assert load_prompts([f"{path}:template={tmp_path / 't.txt'}"])[0].turns == ("<<puts 1>>",)
    assert load_prompts([f"{path}:template=solve"])[0].turns == (TEMPLATES["solve"].replace("{prompt}", "puts 1"),)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("a.jsonl:join=x", "join=x: expected a positive"),
        ("a.jsonl:limit=0", "limit=0: expected a positive"),
        ("a.jsonl:limit=x", "limit=x"),
        ("a.jsonl:colour=red", "unknown option 'colour'"),
        ("a.jsonl:transform=magic", "expected one of python_stub"),
        ("a.jsonl:where=x", "expected where=FIELD=VALUE"),
        ("a.jsonl:template=absent", r"template 'absent': expected text with \{prompt\}"),
        ("hub:", "expected hub:OWNER/NAME"),
        ("a\udce9.jsonl", r"'a\\udce9.jsonl': name .by default the file's.: holds half a character"),
        ("a.jsonl:template=\udce9 {prompt}", r"template '\\udce9 {prompt}': holds half a character"),
    ],
)
def test_bad_specs(spec, message):
    with pytest.raises(InputError, match=message):
        parse_source(spec)


def test_hub_without_the_library_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match=r"peagle\[train\]"):
        load_prompts(["hub:owner/name"])


def test_hub_arguments_and_errors(monkeypatch):
    calls = []

    def load_dataset(name, config, split):
        calls.append((name, config, split))
        if name == "owner/gated":
            raise ConnectionError("offline")
        return [{"ask": "Why?", "prompt": "no"}]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    prompts = load_prompts(["hub:owner/name:test:ask:config=main:name=hub"])
    assert [(p.source, p.turns) for p in prompts] == [("hub", ("Why?",))]
    assert calls == [("owner/name", "main", "test")]
    with pytest.raises(InputError, match=r"hub:owner/gated.*cannot be loaded: ConnectionError: offline"):
        load_prompts(["hub:owner/gated"])


def test_hub_reads_a_local_folder(tmp_path):
    pytest.importorskip("datasets")
    write(tmp_path / "train.jsonl", [{"prompt": "Hello there"}])
    assert load_prompts([f"hub:{tmp_path}"])[0].turns == ("Hello there",)
