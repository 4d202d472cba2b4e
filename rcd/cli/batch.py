"""`rcd generate --input ... --output ...`: a file of prompts, answered by one process, several, or a cluster."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import IO, TYPE_CHECKING, Any

from rcd.cli.flags import Given, flag_of
from rcd.cli.notes import note, note_model, note_rule
from rcd.cli.options import Interrupted
from rcd.cli.progress import Show, progress
from rcd.errors import RCDError, unwritable, whole
from rcd.evaluate.wording import counted

if TYPE_CHECKING:
    from rcd.api import Pipeline
    from rcd.batch.lines import Input
    from rcd.batch.output import Outcome, Output
    from rcd.batch.running import Source
    from rcd.decode.config import DecodeConfig


@dataclass(frozen=True)
class Batch:
    """What the command line says of one."""

    input: str
    output: str
    source: Source
    decoding: Given
    carry: str | None
    chat: bool | None
    rows: int
    ray: bool
    actors: int | None

    def check(self) -> None:
        """What can be refused before a model is read."""
        from rcd.batch.lines import STREAM

        whole("--batch", self.rows, least=1)
        if self.actors is not None:
            whole("--actors", self.actors, least=1)
        if self.ray and STREAM in (self.input, self.output):
            raise RCDError("--ray reads and writes files; name one with --input and one with --output.")
        if STREAM not in (self.input, self.output) and os.path.realpath(self.input) == os.path.realpath(self.output):
            raise RCDError("--input and --output are the same file; name another one for the answers.")


def run(batch: Batch) -> None:
    """Answer the lines that have no answer yet."""
    from rcd.batch.lines import STREAM, Input

    batch.check()
    asked = batch.decoding.config()  # flags are checked before a large model is read
    given = Input(batch.input)
    if batch.ray:
        outcome = _on_a_cluster(batch, asked, given)
    elif batch.output == STREAM or not given.again:
        outcome = _streamed(batch, asked, given)
    else:
        outcome = _shared(batch, asked, given)
    if outcome is not None:
        tell(outcome, batch.output)


def tell(outcome: Outcome, output: str) -> None:
    if outcome.bad:
        raise RCDError(outcome.complaint("the output" if output == "-" else output))
    print(f"{counted(outcome.answered, 'line')} answered", file=sys.stderr)


def _opened(batch: Batch, asked: DecodeConfig, source: Source) -> tuple[Pipeline, Pipeline | None, DecodeConfig]:
    pipeline, second = source.load(batch.rows)
    config = configured(pipeline, batch.decoding, batch.carry, asked)
    if os.environ.get("RANK", "0") == "0":
        note_model(source.model, pipeline, pipeline.resolve(config).window)
    return pipeline, second, config


def configured(pipeline: Pipeline, decoding: Given, carry: str | None, asked: DecodeConfig) -> DecodeConfig:
    """What was asked, with the carry that it means for this checkpoint."""
    chosen, idle = decoding.chosen(carry, pipeline.checkpoint.rcd.carry)
    if idle:
        note(f"{', '.join(map(flag_of, idle))}: no effect with --carry none")
    note_rule(decoding.values, asked.commit)
    return replace(asked, carry=chosen)


# -- from or to a pipe --------------------------------------------------------------------------------------------


def _streamed(batch: Batch, asked: DecodeConfig, given: Input) -> Outcome:
    """In order, as the lines come; there is nothing to go on from."""
    from rcd.batch.output import Ordered
    from rcd.batch.running import SORTED, answer, settings_of

    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise RCDError("several processes cannot share a pipe; name a file with --input and one with --output.")
    total = given.scan().count if given.again else None
    pipeline, second, config = _opened(batch, asked, batch.source)
    settings_of(pipeline, batch.source, config, batch.chat)
    with stream_to(batch.output) as out, progress(total) as show:
        ordered = Ordered(out)
        lines = ordered.noted(given)
        ahead = SORTED if given.again else 1  # who writes into a pipe may wait for an answer
        records = answer(pipeline, lines, config, reference=second, chat=batch.chat, batch=batch.rows, ahead=ahead)
        try:
            with closing(records):
                for number, record in enumerate(records, 1):
                    ordered.append(record)
                    show(number, len(ordered.bad))
        except KeyboardInterrupt as error:
            raise Interrupted(f"the first {counted(ordered.written, 'line')} are answered") from error
    return ordered.outcome()


@contextmanager
def stream_to(output: str) -> Iterator[IO[str]]:
    from rcd.batch.lines import STREAM

    if output == STREAM:
        yield sys.stdout
        return
    try:
        with open(output, "x", encoding="utf-8") as file:
            yield file
    except FileExistsError as error:
        raise RCDError(
            f"{output} is there already, and no run can go on with what comes from a pipe; choose another --output."
        ) from error
    except OSError as error:
        raise unwritable("the answers", output, error, "choose another --output") from error


# -- files --------------------------------------------------------------------------------------------------------


def _shared(batch: Batch, asked: DecodeConfig, given: Input) -> Outcome | None:
    """This process's share of the lines. The last process to end puts all answers in order, and speaks."""
    from accelerate import PartialState

    from rcd.batch.output import Output
    from rcd.batch.running import answer, settings_of

    scan = given.scan()
    state = PartialState(cpu=batch.source.device == "cpu")
    place = state.device if state.num_processes > 1 and batch.source.device == "auto" else batch.source.device
    pipeline, second, config = _opened(batch, asked, replace(batch.source, device=place))
    output = Output(batch.output, settings_of(pipeline, batch.source, config, batch.chat), scan)
    if state.is_main_process:
        output.claim()
    state.wait_for_everyone()
    held = output.held()
    state.wait_for_everyone()  # before anyone writes
    mine = scan.without(held, state.process_index, state.num_processes)
    lines = given.at(mine.numbers, mine.offsets)
    records = answer(pipeline, lines, config, reference=second, chat=batch.chat, batch=batch.rows)
    speaks = state.is_main_process
    return kept(records, output, mine.count, held.count, process=state.process_index, speaks=speaks)


def _on_a_cluster(batch: Batch, asked: DecodeConfig, given: Input) -> Outcome | None:
    from rcd.batch.cluster import Cluster, Work
    from rcd.batch.output import Output

    scan = given.scan()
    settings = partial(configured, decoding=batch.decoding, carry=batch.carry, asked=asked)
    cluster = Cluster(Work(batch.source, settings, batch.chat, batch.rows, batch.input), batch.actors)
    output = Output(batch.output, cluster.settings(), scan)
    output.claim()
    held = output.held()
    mine = scan.without(held)
    return kept(cluster.records(mine.numbers, mine.offsets), output, mine.count, held.count)


def kept(
    records: Generator[dict[str, Any]], output: Output, pending: int, held: int, process: int = 0, speaks: bool = True
) -> Outcome | None:
    """Every record on the disk as soon as it is there, and at the end all of them in order."""
    done = bad = 0
    if pending:
        if speaks and held:
            note(f"{counted(held, 'line')} of {output.scan.count:,} answered before")
        try:
            with closing(output.journal(process)) as journal, closing(records), _progress(pending, speaks) as show:
                for record in records:
                    journal.append([record])
                    done, bad = done + 1, bad + ("error" in record)
                    show(done, bad)
        except KeyboardInterrupt as error:
            raise Interrupted(
                f"{counted(output.held().count, 'line')} answered, and the same command goes on"
            ) from error
    return output.finish(speaks and not pending)


def _progress(total: int, speaks: bool) -> AbstractContextManager[Show]:
    return progress(total) if speaks else nullcontext(lambda done, bad: None)
