"""Does a loader go on from its state exactly: same samples, same pixels, at every step?

    from gpuprefetch.testing import assert_resumes_at_every_step

    def test_my_pipeline_resumes():
        assert_resumes_at_every_step(make_loader)  # your function, at module level

A reference run saves a state at each step. Each state is then loaded into a new loader,
in a fresh process and with random generators that stand elsewhere, and what follows is
compared bit by bit, on into the next epoch. It takes any loader with a state, also one
that is not of this package.
"""

import hashlib
import io
import multiprocessing
import pickle
import random
import traceback
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from itertools import zip_longest
from multiprocessing.connection import Connection
from typing import Any

import torch

from gpuprefetch.batch import leaves_of, path_to
from gpuprefetch.errors import SettingError, SettingTypeError
from gpuprefetch.generators import (
    global_generators,
    put_back,
    read_states,
    write_states,
)

__all__ = ["assert_resumes_at_every_step"]

# One batch: for each leaf its place, kind and digest.
_Marks = list[str]
# What came after a state, by epoch; or the text of an error.
_Outcome = list[list[_Marks]] | str
_Outcomes = Generator[_Outcome, None, None]


@dataclass(frozen=True, slots=True)
class _Job:
    """What is checked; travels to other processes."""

    make_loader: Callable[[], Any]
    before_epoch: Callable[[Any, int], object] | None
    num_epochs: int
    num_threads: int
    """Of torch's operations; sums may round otherwise with another number."""

    def begin(self, loader: Any, epoch: int) -> None:
        """Do what a training script does before each epoch."""
        if self.before_epoch is not None:
            self.before_epoch(loader, epoch)


@dataclass(frozen=True, slots=True)
class _Save:
    """A state as a checkpoint holds it."""

    epoch: int
    step: int
    """Batches that the loop had got; those of the whole epoch after its end."""
    is_between: bool
    """Taken after the end of the epoch."""
    data: bytes


@dataclass(slots=True)
class _Reference:
    """The run that was never interrupted."""

    epochs: list[list[_Marks]] = field(default_factory=list)
    saves: list[_Save] = field(default_factory=list)
    worlds: list[dict[str, Any]] = field(default_factory=list)
    """The global generators' states at the start of each epoch."""

    def after(self, save: _Save) -> list[list[_Marks]]:
        """Give what must follow a state: the rest of its epoch, and the next one."""
        rest = [] if save.is_between else [self.epochs[save.epoch][save.step :]]
        return rest + self.epochs[save.epoch + 1 : save.epoch + 2]


def assert_resumes_at_every_step(
    make_loader: Callable[[], Any],
    *,
    epochs: int = 2,
    before_epoch: Callable[[Any, int], object] | None = None,
    fresh_process: bool = True,
) -> None:
    """Assert that a new loader goes on exactly from the state saved at any step.

    States are saved at the start of each epoch, after each batch and after its end, and
    sent through ``torch.save`` and ``torch.load(weights_only=True)``. Each new loader
    yields one batch, is saved once more, and another one goes on. At the start of a
    whole epoch the global random generators (torch's CPU one, Python's, NumPy's) are
    set as in the reference run, as a checkpoint of them would; in mid-epoch they are
    not.

    Args:
        make_loader: Builds equal loaders, each with ``state_dict`` and
            ``load_state_dict``.
        epochs: How many epochs are walked through; at least 1.
        before_epoch: Called with the loader and the epoch's number before each epoch,
            resumed ones too: ``loader.sampler.set_epoch(epoch)``, for example.
        fresh_process: Resume in a process started by ``spawn``, forked anew for each
            state where processes can fork. Then the functions must be picklable, at
            module level. ``False``: in this process, which is quicker and finds less.

    Raises:
        AssertionError: Something differs, or a state could not be loaded. The message
            names the step and the first leaf.
        SettingError: ``epochs`` is less than 1.
        SettingTypeError: A function cannot be sent to a fresh process.
    """
    if epochs < 1:
        raise SettingError(
            f"epochs must be at least 1, got {epochs}: nothing to check."
        )
    job = _Job(make_loader, before_epoch, epochs, torch.get_num_threads())
    with put_back(global_generators()):
        reference = _run_reference(job)
        run = _in_processes if fresh_process else _in_this_process
        with closing(run(job, reference)) as outcomes:
            for save, outcome in zip(reference.saves, outcomes, strict=True):
                _compare(save, reference.after(save), outcome)


def _run_reference(job: _Job) -> _Reference:
    reference = _Reference()
    _set_world(0)
    loader = job.make_loader()
    for epoch in range(job.num_epochs):
        reference.worlds.append(read_states(global_generators()))
        job.begin(loader, epoch)
        batches: list[_Marks] = []
        iterator = iter(loader)
        reference.saves.append(_Save(epoch, 0, False, _save(loader)))
        for batch in iterator:
            batches.append(_marks(batch))
            data = _save(loader)
            reference.saves.append(_Save(epoch, len(batches), False, data))
            _draw_as_a_loop_does()
        if not batches:
            raise AssertionError("the loader yields no batch: nothing can be checked")
        reference.saves.append(_Save(epoch, len(batches), True, _save(loader)))
        reference.epochs.append(batches)
    _close(loader)
    return reference


def _resume(job: _Job, save: _Save, worlds: list[dict[str, Any]]) -> list[list[_Marks]]:
    """Go on from a state with new loaders; give what came, by epoch."""
    _set_world(1 + save.step)
    loader = job.make_loader()
    loader.load_state_dict(_load(save.data))
    outcome: list[list[_Marks]] = []
    if not save.is_between:
        job.begin(loader, save.epoch)
        iterator = iter(loader)
        rest = [_marks(batch) for batch in _first_of(iterator)]
        if rest:
            data = _save(loader)
            del iterator
            _close(loader)
            _set_world(1000 + save.step)
            loader = job.make_loader()
            loader.load_state_dict(_load(data))
            job.begin(loader, save.epoch)
            rest += [_marks(batch) for batch in loader]
        outcome.append(rest)
    if save.epoch + 1 < job.num_epochs:
        write_states(global_generators(), worlds[save.epoch + 1])
        job.begin(loader, save.epoch + 1)
        outcome.append([_marks(batch) for batch in loader])
    _close(loader)
    return outcome


def _first_of(iterator: Iterator[Any]) -> Iterator[Any]:
    for batch in iterator:
        yield batch
        return


# Raised by hand, here and above: `python -O` takes assert statements out, and a test
# that cannot fail would be left.
def _compare(save: _Save, expected: list[list[_Marks]], outcome: _Outcome) -> None:
    place = "its end" if save.is_between else f"step {save.step}"
    where = f"resumed in epoch {save.epoch} after {place}"
    if isinstance(outcome, str):
        raise AssertionError(f"{where}: it failed\n{outcome}")
    first = save.epoch + save.is_between
    for epoch, (left, right) in enumerate(zip(expected, outcome, strict=True), first):
        skipped = save.step if epoch == save.epoch else 0
        for number, (before, now) in enumerate(zip(left, right, strict=False), skipped):
            if before != now:
                raise AssertionError(
                    f"{where}: batch {number} of epoch {epoch} differs; first leaf:\n"
                    + _first_difference(before, now)
                )
        if len(left) != len(right):
            raise AssertionError(
                f"{where}: {len(right)} batches follow in epoch {epoch}, not "
                f"{len(left)}"
            )


def _first_difference(before: _Marks, now: _Marks) -> str:
    pairs = zip_longest(before, now, fillvalue="no such leaf")
    left, right = next(pair for pair in pairs if pair[0] != pair[1])
    return f"  without the break {left}\n  resumed           {right}"


# The random world around a loader #


def _set_world(seed: int) -> None:
    """Set the global generators, each elsewhere than with any other seed."""
    torch.default_generator.manual_seed(12345 + seed)
    random.seed(seed)
    numpy = global_generators().get("numpy.random")
    if numpy is not None:
        numpy.seed(seed)


def _draw_as_a_loop_does() -> None:
    for generator in global_generators().values():
        if isinstance(generator, torch.Generator):
            torch.rand(3, device="cpu")
        else:
            generator.random()


# Checkpoints and batches #


def _save(loader: Any) -> bytes:
    file = io.BytesIO()
    torch.save(loader.state_dict(), file)
    return file.getvalue()


def _load(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True)


def _marks(batch: Any) -> _Marks:
    """Describe every leaf: place, type, and a digest of its bytes."""
    return [f"{path_to(batch, leaf)}: {_mark(leaf)}" for leaf in leaves_of(batch)]


def _mark(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        kind = f"{type(leaf).__name__} {leaf.dtype} {tuple(leaf.shape)} {leaf.device}"
        data = _bytes_of(leaf.detach())
    else:
        kind = type(leaf).__name__
        try:
            data = pickle.dumps(leaf)
        except Exception:
            data = b""
    value = f" {leaf!r}" if isinstance(leaf, (str, int, float)) else ""
    return f"{kind}{value} {hashlib.sha256(data).hexdigest()[:16]}"


def _bytes_of(tensor: torch.Tensor) -> bytes:
    if tensor.is_nested:
        return b"".join(map(_bytes_of, tensor.unbind()))
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    plain = tensor.cpu().as_subclass(torch.Tensor).resolve_conj().resolve_neg()
    return plain.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _close(loader: Any) -> None:
    close = getattr(loader, "close", None)
    if callable(close):
        close()


# Processes #


def _in_this_process(job: _Job, reference: _Reference) -> _Outcomes:
    for save in reference.saves:
        yield _attempt(job, save, reference.worlds)


def _in_processes(job: _Job, reference: _Reference) -> _Outcomes:
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(
        target=_serve, args=(job, reference.saves, reference.worlds, sender)
    )
    try:
        process.start()
    except (AttributeError, pickle.PicklingError, TypeError) as error:
        raise SettingTypeError(
            "make_loader and before_epoch must be picklable for a fresh process: "
            "functions at module level, or functools.partial of such. Or pass "
            f"fresh_process=False. ({error})"
        ) from error
    sender.close()
    try:
        for _ in reference.saves:
            try:
                yield receiver.recv()
            except EOFError:
                process.join()
                yield f"the process ended with exit code {process.exitcode}"
                return
    finally:
        receiver.close()
        process.join(10)
        process.kill()
        process.join()


def _serve(
    job: _Job, saves: list[_Save], worlds: list[dict[str, Any]], sender: Connection
) -> None:
    """Resume from each state in a process in which nothing has been iterated yet."""
    can_fork = "fork" in multiprocessing.get_all_start_methods()
    for save in saves:
        if not can_fork:
            _answer(job, save, worlds, sender)
            continue
        process = multiprocessing.get_context("fork").Process(
            target=_answer, args=(job, save, worlds, sender)
        )
        process.start()
        process.join()
        if process.exitcode:
            return


def _answer(
    job: _Job, save: _Save, worlds: list[dict[str, Any]], sender: Connection
) -> None:
    torch.set_num_threads(job.num_threads)
    sender.send(_attempt(job, save, worlds))


def _attempt(job: _Job, save: _Save, worlds: list[dict[str, Any]]) -> _Outcome:
    try:
        return _resume(job, save, worlds)
    except Exception:
        return traceback.format_exc()
