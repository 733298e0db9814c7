"""From flags, target and answers to a run that is ready for its next step."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from peagle.config.training import TrainConfig
from peagle.drafter.model import Drafter
from peagle.errors import InputError
from peagle.target.model import Target
from peagle.training.distributed import World
from peagle.training.draft_vocab import DraftVocab, choose_draft_vocab
from peagle.training.facts import description
from peagle.training.identity import full_identity
from peagle.training.init import choose_mask_token, new_drafter
from peagle.training.init_from_head import mask_token_of
from peagle.training.memory import fits
from peagle.training.plan import Plan, compute_dtype, make_plan
from peagle.training.resume import Sources, load_run, restore
from peagle.training.scan import Answers, Scan, scan_answers
from peagle.training.state_cache import StateCache
from peagle.training.states import StoredStates, open_states
from peagle.training.target_states import TargetStates, states_name
from peagle.training.train_state import TrainState, new_state
from peagle.training.weights import Weights, make_weights


@dataclass
class Run:
    """What the loop works on."""

    sources: Sources
    plan: Plan
    target_states: TargetStates
    weights: Weights
    state: TrainState
    token_counts: np.ndarray | None  # [V] of the answers' tokens; None: the head has a draft vocabulary of its own


def prepare(config: TrainConfig, target: Target, answers: Answers, say: Callable[[str], None], world: World) -> Run:
    """A new run, or one that goes on from its last checkpoint. Raises InputError for what the user has to change."""
    output = Path(config.output)
    if output.exists() and not output.is_dir():
        raise InputError(f"output: {output} is a file, expected a folder")
    stored: StoredStates | None = None
    left_out: list[int] = []
    if config.hidden_states is not None:
        stored, left_out = open_states(Path(config.hidden_states), config.on_corrupt, world, say)
    data = answers.fingerprint
    if left_out:  # other data, as far as going on with a run is concerned
        data = hashlib.sha256(f"{data} without {left_out}".encode()).hexdigest()
    computed = f"head in {compute_dtype(config, target)}, target in {target.dtype}".replace("torch.", "")
    sources = Sources(data, full_identity(target), states_name(stored), computed)
    saved = load_run(config, sources)
    _same_step(0 if saved is None else saved["step"], config, world)

    scan = scan_answers(answers, config.pack_length, target.vocab_size).without(left_out)
    say(f"data: {scan.summary()}")
    drafter, vocab = _first_head(config, target, answers, scan, say)
    head = drafter.config
    if stored is not None:
        stored.check(
            target=sources.target,
            data=answers.fingerprint,
            aux_layer_ids=head.aux_hidden_state_layer_ids,
            documents=scan.documents,
            lengths=scan.lengths,
            left_out=getattr(answers, "corrupt", ()),
        )
        say(f"target states: {sources.states} from {config.hidden_states}")
    if head.mask_token_id is not None:
        say(f"mask token: {head.mask_token_id}")

    sizes = {} if saved is None else saved.get("sizes", {})
    plan = make_plan(config, target, answers, scan, head, vocab, world, stored=stored is not None, sizes=sizes)
    with fits("layers: weights and gradients of the head", "lower --layers, or use several GPUs with --parallel fsdp"):
        weights = make_weights(plan, drafter, target)
    cache = StateCache(int(config.state_cache_gib * 2**30), int(plan.schedule.lengths.sum()))
    layers = head.aux_hidden_state_layer_ids
    target_states = TargetStates(target, stored, cache, layers, config.pack_length, plan.dtype)
    state = new_state(config.depths, plan.device)
    if saved is not None:
        restore(saved, weights, state, world)
        say(f"resumed at step {state.step}")
        now = asdict(plan.sizes)
        if resized := [f"{name} {size} -> {now[name]}" for name, size in sizes.items() if now.get(name, size) != size]:
            say(f"{', '.join(resized)}: the same gradients, their sums rounded differently from here on")
    weights.copy.refresh()
    for line in description(plan, weights):
        say(line)
    counts = None if vocab is not None else answers.token_counts(target.vocab_size)
    return Run(sources, plan, target_states, weights, state, counts)


def _same_step(step: int, config: TrainConfig, world: World) -> None:
    """Raises InputError unless all processes have read the same checkpoint; they would train different weights."""
    last, first = world.agree([float(step), -float(step)])
    if last != -first:
        raise InputError(
            f"output: process {world.rank} goes on from step {step} of {config.output}, others from {-first:.0f} to "
            f"{last:.0f}, expected one folder that every process sees as it is now"
        )


def _first_head(
    config: TrainConfig, target: Target, answers: Answers, scan: Scan, say: Callable[[str], None]
) -> tuple[Drafter, DraftVocab | None]:
    """The head that training begins with, and its draft vocabulary where that is a part of the target's."""
    wanted = config.mask_token_id
    if wanted is None and config.init_head is not None:
        wanted = mask_token_of(config.init_head)
    mask_token = None if config.kind == "eagle3" else choose_mask_token(target, scan.seen, wanted)
    vocab = None
    if config.draft_vocab_size is not None and config.draft_vocab_size != target.vocab_size:
        vocab = choose_draft_vocab(answers.token_counts(target.vocab_size), config.draft_vocab_size)
        kept = f"{config.draft_vocab_size} of {target.vocab_size} ids"
        say(f"draft vocabulary: {kept}, {vocab.coverage:.2%} of the answers' tokens")
    drafter, remarks = new_drafter(config, target, mask_token, vocab)
    longest = int(scan.lengths.max())
    if drafter.config.max_position_embeddings < longest:
        raise InputError(
            f"max_position_embeddings: the head would have {drafter.config.max_position_embeddings}, expected at least "
            f"{longest}, the longest training document; give --max-position-embeddings {longest}, or cut documents "
            "with a lower --pack-length"
        )
    drafter.config = replace(drafter.config, max_train_length=longest)
    for remark in remarks:
        say(remark)
    return drafter, vocab
