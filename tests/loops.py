"""Random training loops: from a seed, a small frozen description of one.

`loop_runner` runs a description against the oracle. A loop that fails is run again by its seed alone:
`make soak ARGS="--seeds 17:18"`.

What is left out is what FSDP2 itself cannot do, so that no run of dmuon could be compared with anything:

- Under FSDP2 all ranks run the same layers: each gather is a collective.
- Reentrant recomputation of a layer that is used twice: FSDP2's own gradients are wrong.
- With `set_requires_all_reduce(False)`, FSDP2 adds up what it has reduced so far as one flat tensor: all
  backwards until the next full one must give gradients to the same parameters.
- No step, no clipping and no state dicts while gradients are not reduced: FSDP2 would leave out those of the
  base parameters.
- FSDP2 keeps gathered weights after a forward that raises, whatever it is told, until the end of a backward:
  there, one comes next.
- Loading full state dicts into FSDP2 on top of tensor parallelism: torch refuses pieces that are uneven.
- Freezing while gradients are not reduced; evaluation in inference mode before a layer's first training.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, fields

Sizes = dict[str, int]

LAYOUTS: dict[int, tuple[Sizes, ...]] = {
    1: ({"dp": 1}, {"ddp": 1}),
    2: ({"dp": 2}, {"replicate": 2, "shard": 1}, {"dp": 1, "tp": 2}, {"ddp": 2}),
    4: (
        {"dp": 4},
        {"replicate": 2, "shard": 2},
        {"dp": 2, "tp": 2},
        {"replicate": 2, "shard": 1, "tp": 2},
        {"ddp": 4},
        {"ddp": 2, "tp": 2},
    ),
}
WORLD_SIZES = (4, 4, 4, 4, 4, 2, 2, 2, 2, 1)  # of seeds, by their last digit

# What a loop consists of


@dataclass(frozen=True)
class Use:
    """What one forward runs: the layers in order; in those of `spare`, also the matrix that is used at times,
    like an expert. The former is the same on all ranks, the latter need not be."""

    route: tuple[int, ...]
    spare: tuple[int, ...] = ()


@dataclass(frozen=True)
class Micro:
    """A forward and a backward. uses: one for all ranks, or one per data-parallel rank."""

    uses: tuple[Use, ...]
    recompute: str = "no"  # no, reentrant, not_reentrant
    sync: str = "sync"  # sync, no_sync, nested, gradient_sync, all_reduce, keep


@dataclass(frozen=True)
class Pair:
    """Two forwards, then their backwards: in the same order, in the other one, or both at once."""

    first: Micro
    second: Micro
    order: str  # first, last, sum


@dataclass(frozen=True)
class Evaluate:
    """A forward without gradients, whose output is compared."""

    uses: tuple[Use, ...]
    mode: str  # no_grad, inference_mode


@dataclass(frozen=True)
class Forward:
    """A forward with gradients that no backward follows; it raises in layer number `fails` of its route."""

    uses: tuple[Use, ...]
    fails: int | None = None


@dataclass(frozen=True)
class Clip:
    """Clipping by the global norm."""

    max_norm: float


@dataclass(frozen=True)
class ZeroGrad:
    """Also the end of an iteration that skips its step."""

    set_to_none: bool = True


@dataclass(frozen=True)
class Step:
    """An optimizer step. look: compare everything at once; else the next forward may find it in flight."""

    look: bool


@dataclass(frozen=True)
class Freeze:
    """Let these parameters want gradients, or not."""

    names: tuple[str, ...]
    requires_grad: bool


@dataclass(frozen=True)
class Schedule:
    """A step of the learning-rate scheduler."""


@dataclass(frozen=True)
class Write:
    """Weights are changed in place: some of them, or all."""

    names: tuple[str, ...] | None
    factor: float


@dataclass(frozen=True)
class Load:
    """Everything goes through state dicts to a fresh model and optimizer, where the training goes on.

    warm: the fresh model has run, and holds gathered weights, before it is loaded.
    """

    sizes: Sizes
    way: str  # full, dcp, native
    warm: bool


Action = Micro | Pair | Evaluate | Forward | Clip | ZeroGrad | Step | Freeze | Schedule | Write | Load


@dataclass(frozen=True)
class Loop:
    """One training loop, on one model, from one seed."""

    seed: int
    world_size: int
    sizes: Sizes
    # the model
    width: int
    hidden: tuple[int, ...]  # by layer
    has_base: bool  # norms and biases in the layers
    nested_output: bool  # layers return {"h": [tensor]}
    frozen: tuple[str, ...]  # from the start
    double: bool  # float64, with tight tolerances; float32 only without norms, which blow up its rounding
    # the engine
    reshard: bool
    wrap: str  # layers, root: where FSDP2's and our boundaries are
    process_groups: str
    reuse: bool
    # the optimizer
    asynchronous: bool
    nesterov: bool
    weight_decay: float
    adjust_lr_fn: str
    gram: str  # policy of the distributed Gram form
    actions: tuple[Action, ...]

    def __str__(self) -> str:
        lines = [f"{f.name} = {getattr(self, f.name)!r}" for f in fields(self) if f.name != "actions"]
        return "\n".join([*lines, *(f"{number:3}: {action}" for number, action in enumerate(self.actions))])


def world_size_of(seed: int) -> int:
    return WORLD_SIZES[seed % 10]


def matrices_of(layer: int) -> tuple[str, ...]:
    return tuple(f"layers.{layer}.{name}_proj.weight" for name in ("mix", "up", "down", "spare"))


def base_of(layer: int) -> tuple[str, ...]:
    return tuple(f"layers.{layer}.{name}" for name in ("norm.weight", "norm.bias", "up_proj.bias"))


# From a seed


class Generator:
    """Draws one loop. Keeps the little state that says what may come next."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.world_size = world_size_of(seed)
        self.sizes = self.random.choice(LAYOUTS[self.world_size])
        self.depth = self.random.choice((2, 2, 3, 3, 4))
        self.double = self.chance(0.85)
        self.has_base = self.double and self.chance(0.7)
        self.actions: list[Action] = []
        self.pending = False  # gradients that are not reduced
        self.trained: set[int] = set()  # layers that have run in training, since the model was built
        self.all_stepped = False
        self.now_frozen: set[str] = set()

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def loop(self) -> Loop:
        draw = self.random
        width = draw.choice((3, 5))
        hidden = tuple(draw.choice((1, 2, 3, 7)) for _ in range(self.depth))
        if any("tp" in sizes for sizes in LAYOUTS[self.world_size]):
            hidden = tuple(max(2, size) for size in hidden)  # torch's own: an empty piece has no gradient
        names = [name for layer in range(self.depth) for name in self.names_of(layer)]
        frozen = tuple(sorted(draw.sample(names, draw.randint(1, 3)))) if self.chance(0.3) else ()
        self.trainable = [name for name in names if name not in frozen]
        settings = {
            "seed": self.seed,
            "world_size": self.world_size,
            "sizes": self.sizes,
            "width": width,
            "hidden": hidden,
            "has_base": self.has_base,
            "nested_output": self.chance(0.2),
            "frozen": frozen,
            "double": self.double,
            "reshard": self.chance(0.6),
            "wrap": "layers" if self.chance(0.8) else "root",
            "process_groups": "isolated" if self.chance(0.7) else "shared",
            "reuse": self.chance(0.5),
            "asynchronous": self.chance(0.7),
            "nesterov": self.chance(0.7),
            "weight_decay": draw.choice((0.0, 0.1)),
            "adjust_lr_fn": draw.choice(("original", "original", "match_rms_adamw", "none")),
            "gram": draw.choice(("never", "beneficial", "always")),
        }
        for number in range(draw.choice((3, 3, 3, 4, 4, 5, 6))):
            self.iteration(first=number == 0)
        return Loop(**settings, actions=tuple(self.actions))  # type: ignore[arg-type]

    def names_of(self, layer: int) -> tuple[str, ...]:
        return matrices_of(layer) + (base_of(layer) if self.has_base else ())

    # One iteration

    def iteration(self, first: bool) -> None:
        if self.chance(0.4):
            self.in_between()
        if (
            first and not self.now_frozen and self.chance(0.6)
        ):  # every parameter gets its state, so that it can be saved
            everywhere = tuple(range(self.depth))
            self.micro(Micro((Use(everywhere, everywhere),)))
            self.all_stepped = True
        elif self.chance(0.2):
            self.without_all_reduce()
        else:
            for _ in range(self.random.choice((1, 1, 2, 2, 3))):
                self.backward()
                if self.chance(0.15):
                    self.in_between()
        self.finish(first)

    def finish(self, first: bool) -> None:
        if self.pending:
            uses = self.uses()
            self.micro(Micro(uses, self.recompute(uses)))
        if self.chance(0.4):
            self.clip()
        if not (first and self.all_stepped) and self.chance(0.12):
            self.zero()  # a skipped step
            return
        self.actions.append(Step(look=self.chance(0.5)))
        if self.chance(0.1):
            self.actions.append(Step(look=self.chance(0.5)))
        if self.chance(0.9):
            self.zero()
        if self.chance(0.2):
            self.actions.append(Schedule())
        if self.chance(0.15):
            self.load()

    def backward(self) -> None:
        if self.chance(0.15):
            first, second = Micro(self.uses()), Micro(self.uses())
            self.note(first)
            self.note(second)
            self.actions.append(Pair(first, second, self.random.choice(("first", "last", "sum"))))
            self.pending = False
            return
        ways = ["sync"] * 5 + ["no_sync"] * 3 + ["nested", "gradient_sync", "keep"]
        uses = self.uses()
        self.micro(Micro(uses, self.recompute(uses), self.random.choice(ways)))

    def micro(self, micro: Micro) -> None:
        self.note(micro)
        self.actions.append(micro)
        self.pending = micro.sync != "sync"

    def note(self, micro: Micro) -> None:
        for use in micro.uses:
            self.trained |= set(use.route)

    def without_all_reduce(self) -> None:
        """Backwards of which the last alone reduces over the replicas; all by the same parameters."""
        if self.pending:
            self.actions.append(ZeroGrad())
        use = self.use()
        for _ in range(self.random.randint(1, 2)):
            other = self.use() if not self.has_base else Use(self.shuffled(use.route), use.spare)
            self.micro(Micro((other,), self.random.choice(("no", "not_reentrant")), "all_reduce"))
        self.micro(Micro((use,)))

    def in_between(self) -> None:
        """Something else than a backward and a step."""
        kind = self.random.choice(
            ("evaluate", "evaluate", "forward", "fails", "zero", "clip", "freeze", "thaw", "write")
        )
        if kind == "evaluate":
            uses = self.uses()
            seen = all(set(use.route) <= self.trained for use in uses)
            mode = "inference_mode" if seen and self.trained and self.chance(0.4) else "no_grad"
            self.actions.append(Evaluate(uses, mode))
        elif kind == "forward":
            self.actions.append(Forward(self.uses()))
        elif kind == "fails":
            use = self.use(least=1)
            self.actions.append(Forward((use,), self.random.randrange(len(use.route))))
            self.micro(Micro(self.uses()))
        elif kind == "zero":
            self.zero()
        elif kind == "clip" and not self.pending:
            self.clip()
        elif kind == "freeze" and not self.pending and len(self.now_frozen) < 3:
            names = tuple(self.random.sample(self.trainable, self.random.randint(1, 2)))
            self.now_frozen |= set(names)
            self.actions.append(Freeze(names, False))
        elif kind == "thaw" and not self.pending and self.now_frozen:
            self.actions.append(Freeze(tuple(sorted(self.now_frozen)), True))
            self.now_frozen.clear()
        elif kind == "write":
            names = tuple(self.random.sample(self.trainable, 2)) if self.chance(0.5) else None
            self.actions.append(Write(names, self.random.choice((0.9, 1.05))))

    def zero(self) -> None:
        self.actions.append(ZeroGrad(self.chance(0.8)))
        self.pending = False

    def clip(self) -> None:
        self.actions.append(Clip(self.random.choice((0.01, 0.3, 10.0))))

    def load(self) -> None:
        """What torch cannot save is left out: state of frozen parameters, parameters without state."""
        if not self.all_stepped or self.now_frozen:
            return
        way = self.random.choice(("full", "full", "dcp", "native"))
        if way != "native":
            self.sizes = self.random.choice(LAYOUTS[self.world_size])
            if "tp" in self.sizes and "ddp" not in self.sizes:
                way = "dcp"
        self.actions.append(Load(self.sizes, way, self.chance(0.5)))
        self.pending = False
        self.trained.clear()

    # Forwards

    def uses(self) -> tuple[Use, ...]:
        """One for all ranks or, for other experts on each of them, several."""
        use = self.use()
        if self.chance(0.5):
            return (use,)
        spare = [tuple(sorted({i for i in use.route if self.chance(0.5)})) for _ in range(self.world_size)]
        return tuple(Use(use.route, layers) for layers in spare)

    def use(self, least: int = 0) -> Use:
        layers = list(range(self.depth))
        kind = self.random.choice(("all", "all", "some", "some", "shuffled", "repeated", "none"))
        if kind == "some" or (kind == "none" and least):
            layers = sorted(self.random.sample(layers, self.random.randint(1, self.depth)))
        elif kind == "shuffled":
            self.random.shuffle(layers)
        elif kind == "repeated":
            layers.insert(self.random.randrange(self.depth), self.random.choice(layers))
        elif kind == "none":
            layers = []
        return Use(tuple(layers), tuple(sorted({layer for layer in layers if self.chance(0.5)})))

    def shuffled(self, route: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(self.random.sample(route, len(route)))

    def recompute(self, uses: tuple[Use, ...]) -> str:
        how = self.random.choice(("no", "no", "no", "not_reentrant", "reentrant"))
        repeats = any(len(set(use.route)) < len(use.route) for use in uses)
        return "not_reentrant" if how == "reentrant" and repeats else how


def loop_of(seed: int) -> Loop:
    """The loop of a seed; always the same one."""
    return Generator(seed).loop()


def by_layout(seeds: Iterable[int]) -> list[tuple[int, list[int]]]:
    """World sizes and seeds, together those whose loops start on the same layout."""
    groups: dict[str, tuple[int, list[int]]] = {}
    for loop in map(loop_of, seeds):
        groups.setdefault(str(loop.sizes), (loop.world_size, []))[1].append(loop.seed)
    return list(groups.values())
