"""Per-sample augmentation on the device: one plan, three appliers that agree.

The loader takes a Kornia module over by itself. :func:`fuse` is the explicit form, with
a choice of dtype, memory format and resampling; :class:`GraphedTransform` replays any
other device work of fixed shape as a CUDA graph.
"""

from gpuprefetch.augment.fused import FusedAugmentation
from gpuprefetch.augment.fusing import fuse
from gpuprefetch.augment.graphed import GraphedTransform
from gpuprefetch.augment.parameters import Parameters

__all__ = ["FusedAugmentation", "GraphedTransform", "Parameters", "fuse"]
