"""What is measured: an arm is one engine with one method at one K, over one workload at one concurrency, once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from peagle.errors import InputError

METHODS = ("none", "eagle3", "p-eagle")
METHOD_NAMES = {"none": "no speculation", "eagle3": "EAGLE-3", "p-eagle": "P-EAGLE", "endpoint": "as served"}
ENGINES = ("peagle", "peagle-serve", "vllm")


@dataclass(frozen=True, slots=True)
class Setup:
    """What has to be loaded or started: an engine with a head (or none) at a K. k is 0 without speculation, and for an
    endpoint whose K was not told."""

    engine: str
    method: str
    k: int

    @property
    def label(self) -> str:
        """For people: `P-EAGLE K=7 in vllm`."""
        method = METHOD_NAMES.get(self.method, self.method)
        return f"{method}{f' K={self.k}' if self.k else ''} in {self.engine}"


@dataclass(frozen=True, slots=True)
class Arm:
    """One measurement. repeat counts from 0."""

    setup: Setup
    workload: str
    concurrency: int
    repeat: int

    @property
    def key(self) -> str:
        """The same for the same arm in every run; finished arms are known by it."""
        setup = self.setup
        return f"{setup.engine}/{setup.method}/k{setup.k}/{self.workload}/c{self.concurrency}/r{self.repeat}"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self.setup) | {
            "workload": self.workload,
            "concurrency": self.concurrency,
            "repeat": self.repeat,
        }


def plan_setups(engines: Sequence[str], methods: Sequence[str], ks: Sequence[int]) -> list[Setup]:
    """Engines one after another, each without speculation first: what the others are compared with."""
    setups = []
    for engine in engines:
        for method in METHODS:
            if method in methods:
                setups += [Setup(engine, method, k) for k in ([0] if method == "none" else ks)]
    return setups


def plan_arms(
    setups: Sequence[Setup], workloads: Sequence[str], concurrencies: Sequence[int], repeats: int, interleave: bool
) -> list[Arm]:
    """All arms in the order in which they run: a setup's together, so that it is loaded once.

    interleave puts the repeats outermost: what drifts with time then falls on every setup alike, at the price of
    loading each one `repeats` times.
    """
    rounds = [[r] for r in range(repeats)] if interleave else [list(range(repeats))]
    return [
        Arm(setup, workload, concurrency, repeat)
        for some in rounds
        for setup in setups
        for workload in workloads
        for concurrency in concurrencies
        for repeat in some
    ]


def parse_numbers(text: str, flag: str) -> list[int]:
    """`1,4,16` -> [1, 4, 16], in order, without repeats."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise InputError(f"{flag}: got {text!r}, expected positive whole numbers separated by commas, such as 1,4,16")
    return sorted(set(map(int, parts)))


def parse_names(text: str, flag: str, allowed: Sequence[str]) -> list[str]:
    """`none,p-eagle` -> those names, in the order of `allowed`."""
    names = [part.strip() for part in text.split(",")]
    for name in names:
        if name not in allowed:
            raise InputError(f"{flag}: got {name!r}, expected some of {', '.join(allowed)}")
    return [name for name in allowed if name in names]


@dataclass(frozen=True, slots=True)
class GivenEndpoint:
    """`--endpoint URL[,name=N][,method=M][,k=K][,model=ID][,api=chat|completions]`: a server that somebody else runs.

    method and k only say what it is in tables. api completions sends token ids by TARGET's chat template, as to the
    servers started here; chat leaves the template to the server.
    """

    url: str
    name: str
    method: str = "endpoint"
    k: int = 0
    model: str | None = None
    api: str = "chat"

    @property
    def setup(self) -> Setup:
        return Setup(self.name, self.method, self.k)


def parse_endpoint(text: str) -> GivenEndpoint:
    """Raises InputError naming the option."""
    from peagle.client.server_facts import root_url

    url, *options = text.split(",")
    values: dict[str, str] = {}
    for option in options:
        key, found, value = option.partition("=")
        if not found or key not in ("name", "method", "k", "model", "api"):
            raise InputError(f"--endpoint {text}: got {option!r}, expected name=, method=, k=, model= or api=")
        values[key] = value
    method, k, api = values.get("method", "endpoint"), values.get("k", "0"), values.get("api", "chat")
    if method not in (*METHODS, "endpoint"):
        raise InputError(f"--endpoint {text}: method={method}: expected one of {', '.join(METHODS)}")
    if not k.isdecimal():
        raise InputError(f"--endpoint {text}: k={k}: expected a whole number")
    if method == "none" and int(k):
        raise InputError(f"--endpoint {text}: k={k}: expected 0 or nothing with method=none, which drafts no token")
    if api not in ("chat", "completions"):
        raise InputError(f"--endpoint {text}: api={api}: expected chat or completions")
    root = root_url(url)
    name = values.get("name", root.split("://", 1)[1])
    if name in ENGINES:
        raise InputError(f"--endpoint {text}: name={name}: expected another name than an engine's here")
    return GivenEndpoint(root, name, method, int(k), values.get("model"), api)


def plain_first(given: Sequence[GivenEndpoint]) -> list[GivenEndpoint]:
    """Those of a name together, and of them first what does without speculation: the others' answers are compared with
    it. Names, and the others, stay in their order."""
    names = [endpoint.name for endpoint in given]
    return sorted(given, key=lambda endpoint: (names.index(endpoint.name), endpoint.method != "none"))
