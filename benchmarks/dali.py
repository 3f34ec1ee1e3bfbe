"""How is the demo's chain fed by NVIDIA DALI, from batches that Python has?

An external source hands over ready batches without copying them; crop, resize,
rotation, blur and normalization are DALI's own operators with numbers per image, in its
default pipelined execution. DALI rotates images only with the channels last, so it gets
them that way: to turn them around is not counted against it. The iterator for PyTorch
is the documented one; it copies the results into torch's memory.

Tried with DALI 2.4; off CUDA its operators for the CPU run. The only importer of
``nvidia.dali`` here.
"""

import importlib.util
import itertools
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.pipelines import NUM_CLASSES, Pair

__all__ = ["dali_prefetch", "has_dali"]

_NUM_READY = 8
_NUM_THREADS = 4  # On the host; nearly all of the work is on the GPU.


def has_dali() -> bool:
    """Tell whether DALI is installed."""
    try:
        return importlib.util.find_spec("nvidia.dali") is not None
    except ModuleNotFoundError:  # Nothing of the namespace `nvidia` is there.
        return False


def dali_prefetch(
    batch_size: int, image_size: int, device: torch.device
) -> Iterator[Pair]:
    """Give batches of the demo's chain, two ahead.

    Returns:
        (B, 3, H, W), float32 in [0, 1], and (B, 1), int64, both on ``device``.
    """
    from nvidia.dali.plugin.pytorch import DALIGenericIterator

    pipeline = _build(batch_size, image_size, device)
    iterator = DALIGenericIterator([pipeline], ["images", "labels"])
    for (batch,) in iterator:
        yield batch["images"], batch["labels"]


def _ready_batches(batch_size: int, image_size: int) -> Iterator[tuple[Any, Any]]:
    """Serve a few batches in turn, as arrays, pinned where there is CUDA."""
    shape = (batch_size, image_size, image_size, 3)
    ready = []
    for _ in range(_NUM_READY):
        images = torch.randint(0, 256, shape, dtype=torch.uint8)
        labels = torch.randint(0, NUM_CLASSES, (batch_size, 1))
        if torch.cuda.is_available():
            images, labels = images.pin_memory(), labels.pin_memory()
        ready.append((images, labels))
    for images, labels in itertools.cycle(ready):
        yield images.numpy(), labels.numpy()


def _build(batch_size: int, image_size: int, device: torch.device) -> Any:
    from nvidia.dali import fn, pipeline_def, types

    half, is_cuda = image_size // 2, device.type == "cuda"

    @pipeline_def
    def chain() -> tuple[Any, Any]:
        images, labels = fn.external_source(
            source=_ready_batches(batch_size, image_size),
            num_outputs=2,
            batch=True,
            layout=["HWC", ""],
            dtype=[types.UINT8, types.INT64],
            no_copy=True,
        )
        images = images.gpu() if is_cuda else images
        images = fn.crop(
            images,
            crop=(half, half),
            crop_pos_x=fn.random.uniform(range=(0.0, 1.0)),
            crop_pos_y=fn.random.uniform(range=(0.0, 1.0)),
            dtype=types.FLOAT,
        )
        images = fn.resize(
            images,
            size=(image_size, image_size),
            interp_type=types.INTERP_LINEAR,
            antialias=False,
        )
        images = fn.rotate(
            images,
            angle=fn.random.uniform(range=(-45.0, 45.0)),
            keep_size=True,
            fill_value=0.0,
            interp_type=types.INTERP_LINEAR,
        )
        images = fn.gaussian_blur(
            images, window_size=7, sigma=fn.random.uniform(range=(0.1, 2.0))
        )
        images = fn.crop_mirror_normalize(
            images,
            dtype=types.FLOAT,
            output_layout="CHW",
            mean=[0.0, 0.0, 0.0],
            std=[255.0, 255.0, 255.0],
        )
        return images, labels.gpu() if is_cuda else labels

    pipeline = chain(
        batch_size=batch_size,
        num_threads=_NUM_THREADS,
        device_id=(device.index or 0) if is_cuda else None,
        prefetch_queue_depth=2,
    )
    pipeline.build()
    return pipeline
