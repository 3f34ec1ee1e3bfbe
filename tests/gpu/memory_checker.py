"""Does compute-sanitizer find a fault in the fused kernel?

    python tests/gpu/memory_checker.py [--out FILE]

Runs the GPU tests of the kernel under each tool of ``compute-sanitizer``. Before that,
each tool has to find a fault of its kind in a kernel written for that. Exit status 0:
the tools found their faults and nothing else.
"""

import argparse
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[2]

# The last byte of the largest batch is checked in the ordinary run: here it takes long.
_TESTS = (
    "tests/augment/test_on_device.py",
    "tests/gpu/test_fused.py::test_the_gpu_gives_the_pixels_of_the_cpu",
    "tests/gpu/test_fused.py::test_an_explicit_fuse_runs_in_the_loader",
    "--deselect=tests/augment/test_on_device.py::test_a_batch_beyond_two_gigabytes",
)

_FAULTS = {
    "memcheck": "out[threadIdx.x + (1 << 28)] = 1.0f;",
    "racecheck": "__shared__ float s[64]; s[threadIdx.x] = out[threadIdx.x]; "
    "out[threadIdx.x] = s[63 - threadIdx.x];",
    # Lane 16 waits for a barrier that its own mask leaves out.
    "synccheck": "unsigned lane = threadIdx.x % 32; "
    "unsigned mask = __ballot_sync(0xffffffffu, lane < 16); "
    "if (lane <= 16) __syncwarp(mask); out[threadIdx.x] = mask;",
    "initcheck": "out[threadIdx.x] = out[threadIdx.x + 64];",
}
"""For each tool, what it has to find."""

# Looking at our kernels alone saves time. What other kernels have written is known only
# to a tool that looks at those too.
_OURS = ("--kernel-name", "kernel_substring=augment")
_OPTIONS = {
    # Errors that the driver returns belong to whoever asked; cuda-core asks some things
    # only to see whether the driver knows them.
    "memcheck": ("--report-api-errors", "no", *_OURS),
    "racecheck": _OURS,
    "synccheck": _OURS,
    "initcheck": (),
}

_FOUND = 77
"""Exit status when a tool found something."""

_LIMIT_S = 150.0


def _check(tool: str, *command: str) -> tuple[int | None, str]:
    """Run Python under a tool."""
    try:
        finished = subprocess.run(
            [
                *("compute-sanitizer", "--tool", tool, "--print-limit", "20"),
                *_OPTIONS[tool],
                *("--error-exitcode", str(_FOUND), sys.executable, *command),
            ],
            cwd=_ROOT,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_LIMIT_S,
        )
    except subprocess.TimeoutExpired as error:
        return None, str(error)
    return finished.returncode, finished.stdout + finished.stderr


def run_fault(tool: str) -> None:
    """Launch a kernel with the fault that a tool is to find."""
    import torch
    from cuda.bindings import driver
    from cuda.core import Device, LaunchConfig, Program, ProgramOptions, launch

    name = "augment_fault"
    source = f'extern "C" __global__ void {name}(float* out) {{ {_FAULTS[tool]} }}'
    device = Device(torch.cuda.current_device())
    device.set_current()
    options = ProgramOptions(std="c++17", arch=f"sm_{device.arch}")
    kernel = Program(source, "c++", options).compile("cubin").get_kernel(name)
    # Not through torch's allocator, which takes more memory than is asked for.
    _, address = driver.cuMemAlloc(1024)
    config = LaunchConfig(grid=1, block=64)
    launch(device.default_stream, config, kernel, int(address))
    device.sync()


def check_all() -> dict[str, Any]:
    """Run every tool, and give what each did, in values that JSON knows."""
    record: dict[str, Any] = {}
    for tool in _FAULTS:
        started = time.monotonic()
        status, text = _check(tool, __file__, "--fault", tool)
        found_fault = status == _FOUND
        if not found_fault:
            print(text[:1500])
        status, text = _check(tool, "-m", "pytest", "-q", "-m", "gpu", *_TESTS)
        passed = re.search(r"(\d+) passed", text)
        summary = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: .*", text)
        if status != 0:
            print(text[:1500])
        record[tool] = {
            "finds_the_planted_fault": found_fault,
            "status": status,
            "tests_passed": int(passed[1]) if passed else 0,
            "summary": summary[-1:],
            "seconds": round(time.monotonic() - started, 1),
        }
        print(tool, record[tool], flush=True)
    return record


def main() -> int:
    """Run from the command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, help="where to write the record, as JSON")
    parser.add_argument("--fault", choices=_FAULTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.fault:
        run_fault(options.fault)
        return 0
    record = check_all()
    if options.out:
        options.out.write_text(json.dumps(record, indent=1) + "\n")
    is_good = all(
        entry["finds_the_planted_fault"]
        and entry["status"] == 0
        and entry["tests_passed"] > 0
        for entry in record.values()
    )
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
