import pytest

from peagle.data.request_queue import LoopWatch, RequestQueue, is_looping
from peagle.engine.sampling_params import SamplingParams
from tests.data.conftest import END, FakeEngine

PARAMS = SamplingParams(max_tokens=1000)


def drain(queue):
    done = []
    while len(queue):
        done += queue.step()
    return {completion.tag: (completion.token_ids, completion.finish_reason) for completion in done}


def test_tags_come_back_with_their_tokens():
    queue = RequestQueue(FakeEngine(lambda prompt, params: [*prompt, END], batch=2), window=3)
    for number in range(3):
        queue.submit(number, [number + 10] * number, PARAMS)
    assert not queue.has_room
    assert drain(queue) == {n: ([n + 10] * n + [END], "stop") for n in range(3)}
    assert queue.has_room
    assert queue.generated == 6


@pytest.mark.parametrize("at_a_time", [1, 3, 32, 45, 300])
def test_a_loop_ends_at_the_same_token_however_many_come_at_a_time(at_a_time):
    answer = [*range(50), *([7, 8, 9] * 100)]
    watch, at = LoopWatch(64), 0
    while not (end := watch.end(answer[:at], at >= len(answer))):
        assert at < len(answer)
        at += at_a_time
    assert end == 128
    assert LoopWatch(64).end(answer[:129], True) == 128
    assert LoopWatch(64).end(answer[:128], True) == 0, "its last token came with its end"
    assert LoopWatch(0).end(answer, False) == 0


def test_looping_answers_are_ended():
    answers = {1: [*range(50), *([7, 8, 9] * 200)], 2: list(range(600)), 3: [*range(50), *([7] * 200), END]}
    engine = FakeEngine(lambda prompt, params: answers[prompt[0]])
    for limit in (64, 0):
        queue = RequestQueue(engine, window=3, loop_limit=limit)
        for number in answers:
            queue.submit(number, [number], PARAMS)
        done = drain(queue)
        assert done[2] == (answers[2], "length")
        if limit:
            assert done[1][1] == done[3][1] == "loop"
            assert len(done[1][0]) == 128, "at a look, though three tokens come at a time"
            assert answers[1][: len(done[1][0])] == done[1][0]
        else:
            assert done[1] == (answers[1], "length")
            assert done[3] == (answers[3], "stop")


def test_what_a_loop_is():
    assert is_looping([1, 2, 3, *([4, 5] * 8)], 16)
    assert not is_looping([4, 5] * 7, 16)
    assert not is_looping([*range(9), *range(7)], 16), "the run is longer than half"
    assert is_looping([*range(8), *range(8)], 16)


def test_abort_all_forgets_everything():
    queue = RequestQueue(FakeEngine(lambda prompt, params: [1] * 9), window=9)
    queue.submit("a", [1], PARAMS)
    queue.abort_all()
    assert len(queue) == 0
    assert queue.step() == []
