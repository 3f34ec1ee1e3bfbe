"""Run every loop of this folder and write what it prints into docs/diagnosis.md.

    python examples/diagnosis/write_reports.py docs/diagnosis.md [--out FILE]

On a machine without a GPU only the loops that show there are run; the others' reports
are left as they are.
"""

import argparse
import importlib
import re
import sys
import textwrap
from pathlib import Path

import torch

_HERE = Path(__file__).resolve().parent
SHOWN_ON_A_CPU = ("source_bound", "transform_bound_host", "step_bound")
NEEDING_A_GPU = (
    "copy_bound_pageable",
    "copy_bound_bus",
    "transform_bound_device",
    "host_bound",
)


def main() -> None:
    """Replace the blocks that follow ``<!-- report: NAME -->``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("page", type=Path)
    parser.add_argument("--out", type=Path, help="default: the page itself")
    options = parser.parse_args()
    sys.path.insert(0, str(_HERE))
    has_gpu = torch.cuda.is_available()
    where = torch.cuda.get_device_name() if has_gpu else "a CPU"
    text = options.page.read_text()
    for name in SHOWN_ON_A_CPU + (NEEDING_A_GPU if has_gpu else ()):
        report = importlib.import_module(name).main()
        print(f"{name}\n{report}\n", flush=True)
        wrapped = "\n".join(
            textwrap.fill(line, 90, subsequent_indent="    ")
            for line in report.splitlines()
        )
        block = f"<!-- report: {name} -->\nOn {where}:\n\n```text\n{wrapped}\n```\n"
        pattern = rf"<!-- report: {name} -->\n.*?^```text\n.*?^```\n"
        text = re.sub(
            pattern, lambda _, block=block: block, text, flags=re.DOTALL | re.MULTILINE
        )
    (options.out or options.page).write_text(text)


if __name__ == "__main__":
    main()
