"""Do processes end well: the interpreter's own, the workers', forked ones?

Ctrl-C, exit in mid-epoch, a killed worker, a fork. What could disturb pytest runs in a
process of its own, started by :mod:`tests.children`.
"""

import contextlib
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from torch.utils.data import DataLoader

from gpuprefetch import StreamPrefetchLoader
from tests.children import run_script, start_script
from tests.leaks import FEEDER_NAME, wait_until_gone
from tests.sources import Numbers, count

pytestmark = pytest.mark.timeout(30)

both_feeders = pytest.mark.parametrize("background", [False, True])


def numbers(batches: Any) -> list[int]:
    return [int(batch) for batch in batches]


def with_workers(length: int) -> DataLoader:
    return DataLoader(Numbers(length), batch_size=None, num_workers=1)


# A killed worker #


@pytest.mark.parametrize(
    ("persistent", "background"), [(False, False), (False, True), (True, True)]
)
def test_a_killed_worker_is_an_error_not_a_hang(
    persistent: bool, background: bool
) -> None:
    """In a process of its own: torch's signal handler raises at any moment."""
    out = run_script(
        """
        import logging, os, signal, sys, time
        from torch.utils.data import DataLoader
        from gpuprefetch import StreamPrefetchLoader
        from tests.leaks import wait_until_gone
        from tests.sources import WorkerPids
        logging.disable()  # It is said, rightly, that the thread still waits.
        persistent, background = (word == "True" for word in sys.argv[1:])
        source = DataLoader(
            WorkerPids(1000000),
            batch_size=None,
            num_workers=1,
            persistent_workers=persistent,
        )
        def run():
            for x in StreamPrefetchLoader(source, background=background):
                os.kill(int(x), signal.SIGKILL)
                for _ in range(100):
                    time.sleep(0.001)
        try:
            run()
        except RuntimeError as error:
            print(error)
        else:
            print("no error")
        source = None
        # torch looks after its workers every five seconds, and joins them as long.
        print("left:", wait_until_gone(12))
        """,
        str(persistent),
        str(background),
        limit_s=25,
    )
    assert re.search(r"DataLoader worker .*(killed|exited)", out), out
    assert "left: set()" in out


# Ctrl-C and the end of the interpreter #

_LOOP = """
import sys, time
from torch.utils.data import DataLoader
from gpuprefetch import StreamPrefetchLoader
from tests.leaks import wait_until_gone
from tests.sources import SlowNumbers, count

num_workers, background = int(sys.argv[1]), sys.argv[2] == "True"
source = DataLoader(SlowNumbers(1000), batch_size=None, num_workers=num_workers)
loader = StreamPrefetchLoader(source, background=background)
"""


@pytest.mark.parametrize(
    ("where", "num_workers", "background", "join_limit_s"),
    [
        ("waiting", 0, False, 2),
        ("waiting", 0, True, 2),
        ("waiting", 1, False, 2),
        # The worker got the Ctrl-C too; torch looks after it every five seconds, and
        # joins it as long.
        ("waiting", 1, True, 12),
        ("in-the-body", 0, True, 2),
        ("in-the-body", 1, True, 12),
    ],
)
def test_ctrl_c_ends_the_loop_and_all_that_it_started(
    where: str, num_workers: int, background: bool, join_limit_s: int
) -> None:
    pause_s = "0" if where == "waiting" else "30"
    script = (
        _LOOP
        + f"""
try:
    for x in loader:
        if int(x) == 1:
            print("ready", flush=True)
        if int(x) >= 1:
            time.sleep({pause_s})
except KeyboardInterrupt:
    pass
else:
    sys.exit("was not interrupted")
left = wait_until_gone({join_limit_s})
print(left or "clean")
"""
    )
    with start_script(script, str(num_workers), str(background)) as child:
        assert child.read_line() == "ready"
        time.sleep(0.1)
        child.signal_all(signal.SIGINT)
        status, out, err = child.finish(20)
        assert (status, out.strip()) == (0, "clean"), err
        assert "still busy" not in err, "as if the data set hung"
        assert not child.signal_all(signal.SIGKILL), "processes were left"


@pytest.mark.parametrize(("num_workers", "background"), [(0, True), (1, True)])
def test_ctrl_c_uncaught_ends_the_process(num_workers: int, background: bool) -> None:
    script = (
        _LOOP
        + """
for x in loader:
    print("ready", flush=True)
"""
    )
    with start_script(script, str(num_workers), str(background)) as child:
        assert child.read_line() == "ready"
        child.signal_all(signal.SIGINT)
        status, _, err = child.finish(10)
        assert status == -signal.SIGINT or status == 130
        assert "KeyboardInterrupt" in err
        assert "Exception ignored" not in err
        assert "still busy" not in err, "as if the data set hung"
        assert not child.signal_all(signal.SIGKILL), "processes were left"


@pytest.mark.parametrize(
    ("num_workers", "background", "how"),
    [
        (0, False, ""),
        (0, True, ""),
        (1, False, ""),
        (1, True, ""),
        (1, True, "sys.exit()"),
    ],
)
def test_the_interpreter_exits_in_mid_epoch(
    num_workers: int, background: bool, how: str
) -> None:
    script = _LOOP + "iterator = iter(loader)\nnext(iterator)\n" + how
    run_script(script, str(num_workers), str(background), limit_s=25)


def test_the_interpreter_exits_with_persistent_workers_and_two_passes() -> None:
    run_script(
        """
        from torch.utils.data import DataLoader
        from gpuprefetch import StreamPrefetchLoader
        from tests.sources import Numbers, count
        source = DataLoader(Numbers(50), num_workers=1, persistent_workers=True)
        loader = StreamPrefetchLoader(source)
        other = StreamPrefetchLoader(count(9), background=True)
        passes = [iter(loader), iter(other), iter(other)]
        for one in passes:
            next(one)
        """,
        limit_s=25,
    )


def test_the_interpreter_exits_while_the_source_hangs() -> None:
    """A source that never answers must not keep the process alive."""
    run_script(
        """
        import logging, time
        logging.disable()
        from gpuprefetch import StreamPrefetchLoader
        def source():
            yield 0
            time.sleep(1000)
        iterator = iter(StreamPrefetchLoader(source(), background=True))
        next(iterator)
        """,
        limit_s=25,
    )


# Fork #


def in_a_fork(run: Callable[[], bool], limit_s: int = 10) -> int:
    """Run something in a forked child; give its exit status, 0 for ``True``."""
    pid = os.fork()
    if pid == 0:
        # Nothing of pytest may run here: the child leaves by os._exit or by the alarm.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(limit_s)
        status = 1
        with contextlib.suppress(BaseException):
            status = 0 if run() else 2
        os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@both_feeders
def test_a_fork_in_mid_pass_hurts_neither_side(background: bool) -> None:
    loader = StreamPrefetchLoader(count(20), background=background, depth=3)
    iterator = iter(loader)
    next(iterator)

    def use_in_child() -> bool:
        fresh = numbers(loader) == list(range(20))
        loader.close()
        return fresh

    assert in_a_fork(use_in_child) == 0
    assert numbers(iterator) == list(range(1, 20))


def test_an_inherited_pass_does_not_hang_in_a_forked_child() -> None:
    """The child has the pass but not its thread; waiting for it would last for ever."""
    iterator = iter(StreamPrefetchLoader(count(100), background=True))
    next(iterator)

    def use_in_child() -> bool:
        with contextlib.suppress(Exception):
            list(iterator)
        return True

    assert in_a_fork(use_in_child) == 0
    assert numbers(iterator) == list(range(1, 100))


def test_validation_with_workers_inside_a_training_pass() -> None:
    """The usual fork: another DataLoader starts workers while a pass is alive."""
    train = StreamPrefetchLoader(with_workers(4), background=True)
    valid = StreamPrefetchLoader(with_workers(3), background=True)
    seen = []
    for x in train:
        seen.append(int(x))
        if int(x) in (1, 2):
            assert numbers(valid) == [0, 1, 2]
    assert seen == [0, 1, 2, 3]


# The detector detects #


def test_meta_a_hang_in_a_forked_child_is_seen() -> None:
    assert in_a_fork(lambda: time.sleep(20) or True, limit_s=1) == -signal.SIGALRM


def test_meta_a_leaked_thread_is_seen() -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, args=(20,), name=FEEDER_NAME)
    thread.start()
    try:
        assert any(FEEDER_NAME in left for left in wait_until_gone(0.1))
    finally:
        stop.set()
        thread.join()
    assert not wait_until_gone(1)


def test_meta_a_leaked_process_is_seen() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        (left,) = wait_until_gone(0.1)
        assert left.startswith(f"process {child.pid}: {sys.executable}")
    finally:
        child.communicate()
    worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(20,))
    worker.start()
    try:
        (left,) = wait_until_gone(0.1)
        assert left.startswith(f"process {worker.pid}: ")
    finally:
        worker.kill()
        worker.join()
    assert not wait_until_gone(1)


def test_meta_a_script_that_hangs_is_seen() -> None:
    with pytest.raises(AssertionError, match="still running after"):
        run_script("import time; time.sleep(30)", limit_s=1)


def test_meta_a_script_that_complains_is_seen() -> None:
    with pytest.raises(AssertionError, match="standard error"):
        run_script("import sys; print('Exception ignored', file=sys.stderr)")
