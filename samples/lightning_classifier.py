"""Train with PyTorch Lightning for two epochs, with this library's loaders in a data module.

Command::

    python samples/lightning_classifier.py

It makes 48 JPEGs of three colours in a temporary folder. It needs PyTorch and Lightning.

Output::

    batches per epoch: 6 for training, 2 for validation
    after two epochs, the loss is lower than that of guessing: True
    resumed from a checkpoint after 3 of 6 batches: the other 3 come in the same order: True

Lightning accepts the loader unchanged: it has a length, each iteration is an epoch, and Lightning saves its
state in checkpoints. The loader's source already splits the samples over ranks, so disable Lightning's
sampler (``use_distributed_sampler=False``).
"""

from __future__ import annotations

import logging
import math
import tempfile
import warnings
from pathlib import Path
from typing import Any

import lightning
import torch
from made_media import COLORS, make_photos

import spdl_media as sm


class Data(lightning.LightningDataModule):
    """Batches of the images in a folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.train = self.loader(folder / "train", shuffle=True)
        self.valid = self.loader(folder / "valid", shuffle=False)

    @staticmethod
    def loader(folder: Path, *, shuffle: bool) -> sm.DataLoader:
        """Make a loader of normalised floats, for training or validation."""
        return sm.DataLoader(
            sm.ImageFolder(folder, shuffle=shuffle, seed=0),
            preprocessor=sm.ImageRecipe(
                32, random_crop=shuffle, dtype="float32", mean=0.4, std=0.3
            ),
            batch_size=6,
            output_order="input",
            to="torch",
        )

    def train_dataloader(self) -> sm.DataLoader:
        """Called by Lightning."""
        # From a checkpoint at the end of an epoch, Lightning restores its number, not the loader's state.
        self.train.set_epoch(self.trainer.fit_loop.epoch_progress.current.processed)
        return self.train

    def val_dataloader(self) -> sm.DataLoader:
        """Called by Lightning."""
        return self.valid


class Classifier(lightning.LightningModule):
    """A linear layer on the mean colour of an image."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(3, len(COLORS))

    def step(self, batch: Any) -> torch.Tensor:
        """Return the loss of a batch."""
        images, labels = batch
        return torch.nn.functional.cross_entropy(self.layer(images.mean(dim=(2, 3)) * 20), labels)

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        """Called by Lightning."""
        return self.step(batch)

    def validation_step(self, batch: Any, _: int) -> None:
        """Called by Lightning."""
        self.log("loss", self.step(batch), batch_size=len(batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Called by Lightning."""
        return torch.optim.Adam(self.parameters(), lr=0.1)


class Seen(lightning.Callback):
    """Records the labels of all batches, and saves a checkpoint after some."""

    def __init__(self, path: Path, save_after: int = -1) -> None:
        self.path, self.save_after = path, save_after
        self.labels: list[list[int]] = []

    def on_train_batch_end(
        self, trainer: Any, _module: Any, _outputs: Any, batch: Any, _index: int
    ) -> None:
        """Called by Lightning."""
        self.labels.append(batch[1].tolist())
        if len(self.labels) == self.save_after:
            trainer.save_checkpoint(self.path)


def trainer_for(epochs: int, *callbacks: lightning.Callback) -> lightning.Trainer:
    """Return a trainer that writes and prints nothing."""
    return lightning.Trainer(
        max_epochs=epochs,
        callbacks=list(callbacks),
        accelerator="cpu",
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )


def main(folder: Path) -> None:
    """Run the program; see the module."""
    make_photos(folder / "train", 36)
    make_photos(folder / "valid", 12)
    data = Data(folder)
    print(f"batches per epoch: {len(data.train)} for training, {len(data.valid)} for validation")
    trainer = trainer_for(2)
    trainer.fit(Classifier(), datamodule=data)
    loss = float(trainer.callback_metrics["loss"])
    print(
        f"after two epochs, the loss is lower than that of guessing: {loss < math.log(len(COLORS))}"
    )

    checkpoint = folder / "middle.ckpt"
    whole, rest = Seen(checkpoint, save_after=3), Seen(checkpoint)
    trainer_for(1, whole).fit(Classifier(), datamodule=Data(folder))
    trainer_for(1, rest).fit(Classifier(), datamodule=Data(folder), ckpt_path=checkpoint)
    same = rest.labels == whole.labels[3:]
    print(
        f"resumed from a checkpoint after 3 of 6 batches: the other 3 come in the same order: {same}"
    )


if __name__ == "__main__":
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    # Lightning recommends worker processes, which this loader does not need.
    warnings.filterwarnings("ignore", module="lightning.*")
    with tempfile.TemporaryDirectory() as folder:
        main(Path(folder))
