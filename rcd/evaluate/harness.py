"""This project's models as the lm-eval model `rcd`, with the cost of every request recorded.

Importing this module registers the name. `python -m rcd.evaluate.harness --model rcd --model_args pretrained=PATH,...`
is lm-eval's own command line after that import; `rcd lm-eval` is the short way.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rcd.carry.base import Carry, describe
from rcd.carry.parse import parse_carry
from rcd.decode.config import DecodeConfig
from rcd.errors import RCDError, unknown_name, whole
from rcd.evaluate import likelihoods
from rcd.evaluate.likelihoods import Scorer
from rcd.evaluate.provenance import decode_settings, delta_of, dtype_name
from rcd.evaluate.requests import LISTS, SETTINGS, Answerer, several
from rcd.likelihood.settings import ScoreConfig
from rcd.terminal import show

if TYPE_CHECKING:
    from rcd.api import Pipeline

NAME = "rcd"
MISSING = "lm-eval is not installed; pip install lm-eval (or pip install -e '.[lm-eval]')."


def library() -> Any:
    """lm-eval, or the sentence that says how to get it."""
    try:
        import lm_eval
        import lm_eval.models  # its own names first: an empty registry is what makes lm-eval fill it
    except ImportError as error:
        raise RCDError(MISSING) from error
    return lm_eval


@cache
def model_class() -> Any:
    """The lm-eval model, registered as `rcd`."""
    library()
    from lm_eval.api.model import LM
    from lm_eval.api.registry import register_model
    from lm_eval.utils import simple_parse_args_string

    class RCDModel(LM):
        """`pretrained`: a checkpoint or a Pipeline; `requests`: the file that records them; `settings`: of decoding,
        and draws, recursions and greedy of likelihoods."""

        def __init__(
            self,
            pretrained: str | Path | Pipeline,
            *,
            carry: str | dict[str, Any] | Carry | None = None,
            reference: str | Path | Pipeline | None = None,
            batch_size: int | str | None = None,
            max_batch_size: int | None = None,
            device: str | None = None,
            dtype: str = "auto",
            quantize: str | None = None,
            revision: str | None = None,
            requests: str | Path | None = None,
            **settings: Any,
        ) -> None:
            from accelerate import PartialState

            from rcd.api import load

            super().__init__()
            scoring = {name: settings.pop(name) for name in likelihoods.SETTINGS if name in settings}
            config = _config(settings)
            scores = ScoreConfig(**scoring, seed=config.seed, guidance=config.guidance)
            self.processes = PartialState(cpu=device == "cpu")
            self._rank, self._world_size = self.processes.process_index, self.processes.num_processes
            if self._world_size > 1 and device in (None, "auto"):
                device = str(self.processes.device)
            batch = 32 if batch_size is None or str(batch_size).startswith("auto") else int(batch_size)
            where: Any = {"device": device or "auto", "dtype": dtype, "quantize": quantize}
            pipeline = (
                load(pretrained, revision=revision, **where) if isinstance(pretrained, (str, Path)) else pretrained
            )
            second = load(reference, **where) if isinstance(reference, (str, Path)) else reference
            config = replace(config, carry=parse_carry(carry, pipeline.checkpoint.rcd.carry))
            self.answerer = Answerer(
                pipeline, config, reference=second, batch=whole("batch_size", batch, least=1), requests=requests,
                main=self._rank == 0,
            )  # fmt: skip
            causal = pipeline.settings.attention == "block_causal"
            block = config.block_length if causal else None
            self.scorer = Scorer(
                self.answerer, replace(scores, carry=config.carry, batch_size=batch, block_length=block)
            )  # fmt: skip
            self.name = str(pretrained) if isinstance(pretrained, (str, Path)) else "a pipeline"
            self._device = pipeline.model.device

        @classmethod
        def create_from_arg_obj(cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None) -> Any:
            """From lm-eval's command line, whose device is cuda:0 where none is named."""
            import torch

            more = {key: value for key, value in (additional_config or {}).items() if value is not None}
            several = int(os.environ.get("WORLD_SIZE", "1")) > 1  # each has a device of its own
            if more.get("device") == "cuda:0" and (several or not torch.cuda.is_available()):
                del more["device"]
            return cls(**{**more, **arg_dict})

        @classmethod
        def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> Any:
            return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

        def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
            done, answerer = len(self.answerer.told), self.answerer
            texts = answerer.answer(requests, self.cache_hook)
            others = self.gather_object((answerer.told[done:], dict(answerer.wall)))
            for rows, wall in (others or [])[1:]:
                answerer.join(rows, wall)
            return texts

        def all_gather(self, tensor: Any) -> Any:
            from accelerate.utils import gather

            return gather(tensor) if self._world_size > 1 else tensor

        def gather_object(self, obj: Any, dst: int = 0) -> list[Any] | None:
            from accelerate.utils import gather_object

            found = gather_object([obj]) if self._world_size > 1 else [obj]
            return found if self._rank == dst else None

        def barrier(self) -> None:
            self.processes.wait_for_everyone()

        def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
            return self._scored(self.scorer.pairs, requests)

        def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
            return self._scored(self.scorer.texts, requests)

        def _scored(self, score: Any, requests: list[Any]) -> list[Any]:
            done, found = len(self.scorer.told), score(requests, self.cache_hook)
            for rows in (self.gather_object(self.scorer.told[done:]) or [])[1:]:
                self.scorer.join(rows)
            return list(found)

        @property
        def tokenizer(self) -> Any:
            return self.answerer.pipeline.tokenizer

        @property
        def tokenizer_name(self) -> str:
            return str(self.tokenizer.name_or_path or self.name).replace("/", "__")

        @property
        def max_length(self) -> int:
            return self.answerer.pipeline.settings.context_length

        def chat_template(self, chat_template: bool | str = False) -> str | None:
            return str(self.tokenizer.chat_template) if chat_template and self.tokenizer.chat_template else None

        def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
            if not self.tokenizer.chat_template:
                raise RCDError("the tokenizer has no chat template; leave --apply-chat-template out.")
            self.answerer.templated = True
            text = self.tokenizer.apply_chat_template(
                chat_history, tokenize=False, add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )  # fmt: skip
            return str(text)

        def get_model_info(self) -> dict[str, Any]:
            """What lm-eval writes to its results, under `config`; it asks when all is answered."""
            config, pipeline = self.answerer.resolved, self.answerer.pipeline
            carry = config.travelling
            return {
                "carry": describe(carry), "dtype": dtype_name(pipeline),
                "delta": delta_of(carry, config.delta, pipeline.settings.vocab_size),
                "decode": decode_settings(config), "cost": self.answerer.summary(),
                "likelihood": self.scorer.summary(),
            }  # fmt: skip

    RCDModel.__qualname__ = "RCDModel"
    register_model(NAME)(RCDModel)
    return RCDModel


def _config(given: dict[str, Any]) -> DecodeConfig:
    given = {"max_new_tokens" if key == "max_gen_toks" else key: value for key, value in given.items()}
    given |= {key: several(given[key]) for key in LISTS if key in given}
    for key in given:
        if key not in SETTINGS:
            raise unknown_name("model argument or decoding setting", key, [*SETTINGS, *likelihoods.SETTINGS])
    return DecodeConfig(**given)


def task_manager(names: Sequence[str], include: Iterable[str | Path] = ()) -> Any:
    """lm-eval's tasks and those of these folders. A task that cannot be run is refused when it is loaded, before
    anything is decoded. Where the folders have all that is asked for, lm-eval's thousands are not read."""
    library()
    from lm_eval.tasks import TaskManager

    class Manager(TaskManager):
        def load(self, task_list: Any) -> Any:
            try:
                found = super().load(task_list)
            except Exception as error:  # of lm-eval, of the task's own code, of the hub's client
                away = isinstance(error, OSError)
                hint = "its data come from the hub: check the network, or" if away else "mend that, or"
                raise RCDError(
                    f"{', '.join(map(str, task_list))} could not be loaded ({type(error).__name__}: {_line(error)}); "
                    f"{hint} give a task with local data (--include-path)."
                ) from error
            for name, task in found["tasks"].items():
                if getattr(task, "UNSAFE_CODE", False):
                    raise RCDError(
                        f"{name} runs the code that the model writes; that needs lm-eval's own command line: "
                        "python -m rcd.evaluate.harness --model rcd ... --confirm_run_unsafe_code."
                    )
            return found

    folders = [str(folder) for folder in include]
    for folder in folders:
        if not Path(folder).is_dir():
            raise RCDError(f"there is no folder {folder!r} of tasks; mend --include-path.")
    manager = Manager(include_path=folders, include_defaults=False) if folders else None
    if manager is None or not set(names) <= set(manager.all_subtasks):
        manager = Manager(include_path=folders or None)
    for name in names:
        if name not in manager.all_tasks and not Path(name).is_file():
            near = difflib.get_close_matches(name, manager.all_tasks, n=3)
            hint = f"did you mean {' or '.join(near)}? " if near else ""
            raise RCDError(f"lm-eval has no task {name!r}; {hint}`lm_eval ls tasks` lists them.")
    return manager


def _line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")


def run(
    model: Any,
    tasks: Sequence[str],
    output: str | Path,
    *,
    name: str,
    manager: Any = None,
    num_fewshot: int | None = None,
    limit: int | None = None,
    apply_chat_template: bool = False,
    gen_kwargs: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """`lm_eval.simple_evaluate` with an instance of `model_class()`, tasks of `task_manager`. lm-eval's results and
    samples go to `output`; returns its results, in whose `config` are the model's settings and the cost (of several
    processes the first has them, the others nothing)."""
    library()
    from lm_eval import simple_evaluate
    from lm_eval.loggers import EvaluationTracker

    tracker = EvaluationTracker(output_path=str(output))
    results = simple_evaluate(
        model=model, model_args={"pretrained": name}, tasks=list(tasks), num_fewshot=num_fewshot, limit=limit,
        apply_chat_template=apply_chat_template, gen_kwargs=gen_kwargs or None, log_samples=True,
        evaluation_tracker=tracker, task_manager=manager or task_manager(tasks),
    )  # fmt: skip
    model.barrier()
    if results is None:
        return {}
    samples = results.pop("samples")
    tracker.save_results_aggregated(results=results, samples=samples)
    for task in results["configs"]:
        tracker.save_results_samples(task_name=task, samples=samples[task])
    return dict(results)


def __getattr__(name: str) -> Any:
    if name == "RCDModel":
        return model_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def main() -> None:
    """lm-eval's own command line."""
    try:
        model_class()
        from lm_eval.__main__ import cli_evaluate

        cli_evaluate()
    except RCDError as error:
        show(f"rcd: {error}", sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("rcd: interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    from rcd.evaluate import harness

    harness.main()
else:
    with contextlib.suppress(RCDError):
        model_class()
