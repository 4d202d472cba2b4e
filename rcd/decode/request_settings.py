"""What every request may set for itself, whoever shares its batch: tensors beside its row."""

from __future__ import annotations

from rcd.errors import RCDError, told, whole
from rcd.settings import setting, settings

MOST_STOP_IDS = 8
MOST_STOPS, LONGEST_STOP = 16, 256
MOST_LOGPROBS = 20
UNBOUNDED = (
    "max_new_tokens", "factor", "entropy_bound", "kl_threshold", "edit_threshold", "alg_temp", "num_inference_steps",
    "temperature", "top_k",
)  # fmt: skip
"""Settings whose own bounds name no most."""
MOST = 2**31 - 1
"""Of any number that is written into a tensor."""


def refuse_beyond(settings: object, *names: str) -> None:
    """Numbers that no tensor holds would end the requests of others that share the batch."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and value > MOST:
            raise RCDError(f"{name} is {told(value)} and {MOST} is the most; lower it.")


@settings
class RequestSettings:
    """What every request may set for itself, whoever shares its batch."""

    max_new_tokens: int | None = setting(default=None, ge=1)
    """The most new tokens. None: what rcd.json says, else 256; but no more than the model's context has room for.
    A block-causal model answers worse where they end inside a block that its training filled."""
    threshold: float = setting(default=0.85, ge=0, le=1, why="1 commits one token a step")
    """Commit what is surer than this, and at least the best one."""
    factor: float = setting(default=1.0, ge=0)
    """Of the commit rules `factor` and `factor_strict`: larger commits more."""
    entropy_bound: float = setting(default=0.1, ge=0, why="0 commits one token a step")
    """Of the commit rule `entropy_bound`, in nats: larger commits more."""
    kl_threshold: float = setting(default=0.01, ge=0, why="0 commits one token a step")
    """Of the commit rule `klass`, in nats: larger commits more."""
    edit_threshold: float = setting(default=0.5, ge=0, why="1 edits nothing")
    """Of the commit rule `joint_threshold`, for models trained to edit (LLaDA2.1): a token of the unfinished block is
    replaced by a prediction that is surer than this. 0 replaces wherever the prediction differs, 1 nowhere."""
    max_post_steps: int = setting(default=16, ge=0, le=256, why="edits may go round in a circle")
    """Of the commit rule `joint_threshold`: at most so many steps of a block without masks, which goes on while tokens
    are replaced."""
    alg_temp: float = setting(default=0.0, ge=0, why="0 takes the best")
    """Of Dream's commit rules `maskgit_plus`, `entropy` and `topk_margin`: above 0, what is committed is drawn from
    softmax(score / alg_temp)."""
    num_inference_steps: int | None = setting(default=None, ge=1)
    """At most this many denoising steps a block (LLaDA's `steps` counts all blocks: divide by their number): each step
    then commits at least its share of the block (SDAR's dynamic and static rules). None: at least one token a step, as
    in the paper."""
    temperature: float = setting(default=0.0, ge=0, why="0 is greedy")
    """0 is greedy."""
    top_k: int = setting(default=0, ge=0)
    """Draw from the k most probable tokens; 0 is off."""
    top_p: float = setting(default=1.0, ge=1e-6, le=1, why="1 keeps every token")
    """Draw from the smallest set of tokens of this mass; 1 is off."""
    seed: int = setting(default=0, ge=0, le=2**64 - 1)
    """What tokens are drawn by. Row r of a batch draws by seed + r, whoever else is in it."""
    residual_scale: float = setting(default=1.0, ge=0, le=1, why="alpha_scale of the carry goes above 1")
    """Multiplies the weight of what is carried; 0 decodes without (SeqD)."""
    guidance: float = setting(default=0.0, ge=0, le=100, why="LLaDA's cfg_scale is a few units at most")
    """Classifier-free guidance (LLaDA's `cfg_scale`): decode by un + (s + 1) (cond - un), where `un` are the logits
    with the prompt masked, a second pass each time; 0 is none."""
    stop: tuple[str, ...] = setting(default=())
    """Texts that end the answer, and are not part of it."""
    stop_ids: tuple[int, ...] = setting(default=())
    """Tokens that end the answer, beside the checkpoint's own end tokens."""
    logprobs: int | None = setting(default=None, ge=0, le=MOST_LOGPROBS)
    """Log probabilities of the committed tokens and of so many alternatives of each; None: none."""

    def __post_init__(self) -> None:
        refuse_beyond(self, *UNBOUNDED)
        if 0 < self.temperature < 1e-3:
            raise RCDError(f"a temperature of {self.temperature} overflows; take 0 (greedy) or 0.001 and more.")
        if 0 < self.alg_temp < 1e-3:
            raise RCDError(f"an alg_temp of {self.alg_temp} overflows; take 0 (the best) or 0.001 and more.")
        if len(self.stop) > MOST_STOPS:
            raise RCDError(f"there may be {MOST_STOPS} stop strings at most, not {len(self.stop)}; name fewer.")
        for text in self.stop:
            if not text:
                raise RCDError("a stop string is empty and would end every answer at once; leave it out.")
            if len(text) > LONGEST_STOP:
                raise RCDError(
                    f"a stop string has {len(text)} characters and {LONGEST_STOP} is the most; take its beginning."
                )
        if len(self.stop_ids) > MOST_STOP_IDS:
            raise RCDError(f"there may be {MOST_STOP_IDS} stop_ids at most, not {len(self.stop_ids)}; name fewer.")
        for token in self.stop_ids:
            whole("stop_ids", token, least=0)

    @property
    def new_tokens(self) -> int:
        """max_new_tokens of a resolved configuration."""
        assert self.max_new_tokens is not None, "resolve the configuration first"
        return self.max_new_tokens
