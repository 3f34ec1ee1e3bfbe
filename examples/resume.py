"""How does training go on in the middle of an epoch?

    python examples/resume.py

``state_dict()`` counts the batches that the *loop* got, however far ahead the loader
was. A new loader with that state yields the rest of the epoch, with the same pixels;
what was yielded is not even read again. The checker at the end does so at each step.
"""

import io

import kornia.augmentation as K
import torch
from torch.utils.data import DataLoader

from gpuprefetch import StreamPrefetchLoader
from gpuprefetch.testing import assert_resumes_at_every_step
from gpuprefetch.workloads import PhotographDataset


def build_loader() -> StreamPrefetchLoader[list[torch.Tensor]]:
    dataset = PhotographDataset(32, length=40)
    return StreamPrefetchLoader(
        DataLoader(dataset, 8, shuffle=True),
        transform=K.RandomRotation(45.0, p=1.0),
        seed=1,
    )


def main() -> None:
    torch.manual_seed(0)
    loader = build_loader()
    checkpoint, whole = io.BytesIO(), []
    for step, (x, y) in enumerate(loader):
        whole.append((x, y))
        if step == 2:
            torch.save({"loader": loader.state_dict()}, checkpoint)

    checkpoint.seek(0)
    resumed = build_loader()
    resumed.load_state_dict(torch.load(checkpoint, weights_only=True)["loader"])
    rest = list(resumed)

    same = all(
        torch.equal(x, x_again) and torch.equal(y, y_again)
        for (x, y), (x_again, y_again) in zip(whole[3:], rest, strict=True)
    )
    print(f"saved after 3 of {len(whole)} batches, resumed with the other {len(rest)}")
    print(f"same pixels and labels: {same}")

    # In a test suite leave fresh_process out: a new process finds more.
    assert_resumes_at_every_step(build_loader, epochs=1, fresh_process=False)
    print("the same from every step")


if __name__ == "__main__":
    main()
