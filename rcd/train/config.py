"""TrainConfig: every setting of one stage, checked when it is made; unknown keys are refused."""

from __future__ import annotations

import dataclasses
import json
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from typing import Any

from rcd.carry.base import Carry, describe, is_carry, make, trained_names
from rcd.errors import RCDError, number, one_of, told, unknown_name, whole
from rcd.train.batches import Batching
from rcd.train.residuals import ResidualSource

DEFAULT_CARRY = "residual"
"""The carry that is meant where settings of one are given without a name."""
# what may change between a run and its resume: nothing that the result depends on
RESUMABLE = "device_batch gradient_checkpointing compile flex log_every save_every validate_every keep trackers".split()


def check_kinds(config: Any) -> None:
    """Every field is of the kind that its annotation names."""
    plain = {"int": int, "float": (int, float), "str": str, "bool": bool, "None": type(None)}
    for entry in fields(config):
        value, allowed = getattr(config, entry.name), str(entry.type).split(" | ")
        kinds = [kind for kind in allowed if kind in plain]
        if isinstance(value, bool) and "bool" not in kinds:
            good = False
        elif str(entry.type).startswith(("tuple", "dict")):
            good = isinstance(value, tuple if str(entry.type).startswith("tuple") else dict)
        else:
            good = any(isinstance(value, plain[kind]) for kind in kinds)  # type: ignore[arg-type]
            good = good or ("Carry" in allowed and is_carry(value)) or type(value).__name__ in allowed
        if not good:
            raise RCDError(f"{entry.name} should be {entry.type}, not {told(value)}.")


@dataclass(frozen=True)
class TrainConfig:
    """One stage: SeqD's objective (`carry` none), the residual-aware one of Algorithm 1, or another carry's."""

    model: str = "toy:sdar"
    """The checkpoint that the stage starts from; `toy:FAMILY` is a random one of the shape `toy`; `base` is what the
    recipe's first stage has trained."""
    toy: dict[str, int] = field(default_factory=dict)
    data: str = "sums:2000"
    """A JSONL file, a hub data set, or generated: `tasks:MIX:N`, `sums:N`."""
    split: str = "train"
    prompt_field: str = "prompt"
    response_field: str = "response"
    messages_field: str | None = None
    """A conversation column ({"role", "content"} messages, the last one the answer) instead of the two fields."""
    chat: bool | None = None
    max_length: int = 2048
    min_length: int = 0
    """Examples outside are dropped and counted. (The paper's text keeps samples of 8K tokens and more, its table those
    of 8K and less; the recipes follow the table.)"""
    validation: int = 0
    """So many examples are held out, and their loss is reported."""

    carry: Carry | None = None
    """None: SeqD. `carry.name` chooses: residual, loopholing or none, or another that declares `trains`."""
    residual: ResidualSource = field(default_factory=ResidualSource)
    reference: str | None = None
    """The reference's checkpoint; `reference` is the one of the recipe's own stage."""
    max_new_tokens: int | None = None
    """The length of an answer, for rcd.json: a bidirectional model knows only canvases like those of its training."""

    block_length: int | None = None
    mask_token_id: int | None = None
    attention: str | None = None
    copy: str = "answer"
    """Block layout: `full` ([x_t | x_0]) or `answer` ([prompt | x_0 | x_t]); the loss is the same."""
    noise_per: str = "sequence"
    loss_normaliser: str = "labels"
    label_padding: str = "block"
    row_padding: int = 0
    pack: bool = False
    router_balance: float = 0.0
    """Of a model with experts: the weight of the load-balancing loss (`rcd.train.routing`). 0: none, as SDAR-MoE's and
    LLaDA2's published training has it; SDAR-MoE's configuration names 0.001 for those who switch it on. It is computed
    pass by pass, so that it alone depends on `device_batch`."""

    epochs: float = 1.0
    max_steps: int | None = None
    total_batch: int = 96
    device_batch: int = 1
    learning_rate: float = 1e-5
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    scheduler: str = "constant_with_warmup"
    warmup_ratio: float = 0.03
    clip: float = 1.0
    precision: str = "bfloat16"
    """`bfloat16`: parameters and optimizer in fp32, computation in bf16. `float32`."""
    gradient_checkpointing: bool = True
    compile: bool | None = None
    """Compile layer by layer; None: on a GPU, where it pays."""
    flex: bool | None = None
    """Flex attention; None: on a GPU."""
    lora_rank: int = 0
    lora_alpha: int = 32
    seed: int = 0

    log_every: int = 10
    save_every: int = 500
    keep: int = 2
    """Checkpoints that are kept."""
    validate_every: int = 500
    trackers: tuple[str, ...] = ()
    """`tensorboard`, `wandb`: accelerate's trackers, beside metrics.jsonl."""

    def __post_init__(self) -> None:
        check_kinds(self)
        one_of("copy", self.copy, ("full", "answer"))
        one_of("noise_per", self.noise_per, ("sequence", "block"))
        one_of("loss_normaliser", self.loss_normaliser, ("labels", "example"))
        one_of("label_padding", self.label_padding, ("block", "row", "none"))
        one_of("scheduler", self.scheduler, ("constant_with_warmup", "cosine"))
        one_of("precision", self.precision, ("bfloat16", "float32"))
        for name in ("max_length", "total_batch", "device_batch", "log_every", "save_every", "validate_every", "keep"):
            whole(name, getattr(self, name), least=1)
        if self.max_steps is not None:
            whole("max_steps", self.max_steps, least=1)
        number("epochs", self.epochs, least=1e-6)
        number("learning_rate", self.learning_rate, least=0)
        number("warmup_ratio", self.warmup_ratio, least=0, most=1)
        number("weight_decay", self.weight_decay, least=0)
        number("clip", self.clip, least=0)
        number("router_balance", self.router_balance, least=0)
        for name in ("validation", "min_length", "lora_rank", "row_padding"):
            whole(name, getattr(self, name), least=0)
        if len(self.betas) != 2:
            raise RCDError("betas is a pair such as [0.9, 0.999].")
        for beta in self.betas:
            number("betas", beta, least=0, most=0.999999)
        if self.max_new_tokens is not None:
            whole("max_new_tokens", self.max_new_tokens, least=1)
        if self.row_padding and self.label_padding != "row":
            raise RCDError("row_padding is for label_padding=row; set that, or leave it out.")
        if self.pack and (self.label_padding == "row" or self.residual.trajectory):
            raise RCDError("pack does not go with label_padding=row or with residual.trajectory; leave one out.")
        if self.carry is not None and not (self.carry.trains and self.carry.carries):
            raise RCDError(f"no model is trained for the carry {self.carry.method}; for SeqD, leave the carry out.")
        if self.residual.codebook_gradient and self.carry is not None and not self.carry.reads_codebook:
            raise RCDError(
                "residual.codebook_gradient is for carries whose state is made of the codebook, such as residual; "
                f"{self.carry.method} reads no codebook."
            )

    @property
    def method(self) -> str:
        """`SeqD`, `RCD`, `Loopholing` or what another carry is called."""
        return "SeqD" if self.carry is None else self.carry.method

    @property
    def needs_reference(self) -> bool:
        """Whether any step reads a reference's residuals."""
        own = self.residual.recycling > 0 or (self.residual.trajectory > 0 and self.residual.trajectory_share == 1)
        return self.carry is not None and self.carry.reads_reference and not own

    def with_settings(self, settings: dict[str, Any]) -> TrainConfig:
        """The same with some values replaced; dotted names reach into `carry`, `residual` and `toy`."""
        changed: dict[str, Any] = {}
        kinds = {f.name: str(f.type) for f in fields(self)}
        if "carry.name" in settings:  # before the settings of that carry
            changed["carry"] = self._named_carry(settings["carry.name"])
        for name, value in settings.items():
            head, _, rest = str(name).partition(".")
            if name == "carry.name":
                continue
            if kinds.get(head) == "float" and isinstance(value, str):  # YAML reads 1e-5 as a text
                with suppress(ValueError):
                    value = float(value)
            if head not in [f.name for f in fields(self)]:
                raise unknown_name("training setting", head, [f.name for f in fields(self)])
            if not rest and head in ("carry", "residual", "toy") and value is not None:
                raise RCDError(f"set the parts of {head} one by one, such as {head}.NAME=value.")
            if not rest:
                changed[head] = tuple(value) if isinstance(value, list) else value
                continue
            inner: Any = changed.get(head, getattr(self, head))
            if head == "toy":
                changed[head] = {**inner, rest: value}
            elif head in ("carry", "residual"):
                if inner is None and settings.get("carry.name") == "none":
                    raise RCDError(f"carry 'none' has no settings, so {rest!r} cannot be set.")
                inner = inner if inner is not None else make(DEFAULT_CARRY)
                if rest not in [f.name for f in fields(inner)]:
                    raise unknown_name(f"setting of {head}", rest, [f.name for f in fields(inner)])
                changed[head] = replace(inner, **{rest: tuple(value) if isinstance(value, list) else value})
            else:
                raise RCDError(f"{head} has no settings of its own, so {name!r} cannot be set.")
        try:
            return replace(self, **changed)
        except TypeError as error:
            raise RCDError(f"a training setting has a value of the wrong kind ({error}).") from error

    def _named_carry(self, name: Any) -> Carry | None:
        """The stage's own carry if it has that name, else a new one."""
        one_of("carry to train", name, trained_names())
        if self.carry is not None and describe(self.carry)["name"] == name:
            return self.carry
        carry = make(name)
        return carry if carry.carries else None

    def batching(self, block_length: int, pad_token_id: int) -> Batching:
        pack = self.max_length // block_length * block_length if self.pack else 0
        return Batching(
            total=self.total_batch, device=self.device_batch, block_length=block_length, pad_token_id=pad_token_id,
            per=self.noise_per, normaliser=self.loss_normaliser, label_padding=self.label_padding,
            row_padding=self.row_padding, pack=pack, seed=self.seed,
        )  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """Everything, for train.json; a carry without a name is the default one."""
        content = dataclasses.asdict(replace(self, carry=None))
        if self.carry is not None:
            content["carry"] = describe(self.carry)
            if content["carry"]["name"] == DEFAULT_CARRY:
                del content["carry"]["name"]
        written: dict[str, Any] = json.loads(json.dumps(content))
        return written

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> TrainConfig:
        """The inverse of `to_json`."""

        def tuples(values: dict[str, Any]) -> dict[str, Any]:
            return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}

        values = tuples(content)
        values["residual"] = ResidualSource(**tuples(content["residual"]))
        if content["carry"] is not None:
            carry = {"name": DEFAULT_CARRY, **content["carry"]}
            values["carry"] = make(carry.pop("name"), carry)
        return cls(**values)
