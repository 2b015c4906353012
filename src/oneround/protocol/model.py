"""GlobalModel: the result, from images to class scores, with its preprocessing and class names inside."""

from __future__ import annotations

import hashlib
import json
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor, nn

from oneround.data.augment import MEAN, STD
from oneround.data.files import decode_image
from oneround.errors import ProtocolError, RecipeError
from oneround.models import Ensemble, Inference
from oneround.parts import Part, slot
from oneround.protocol import blob
from oneround.protocol.messages import Broadcast
from oneround.reading import parse_federated
from oneround.recipe import Federated

MANIFEST = "manifest.json"


def preprocessing(recipe: Federated) -> tuple[float, float]:
    """Mean and deviation that images in 0…1 are normalised with before an encoder sees them at inference."""
    return (0.0, 1.0) if recipe.evaluation.unnormalised else (MEAN, STD)


class GlobalModel(nn.Module):
    """Images (n, channels, height, width) as floats in 0…1 → scores (n, classes) whose softmax are class probabilities."""

    def __init__(
        self,
        inference: Inference,
        rule: Part,
        recipe: Federated,
        class_names: tuple[str, ...],
        shape: tuple[int, int, int],
    ) -> None:
        super().__init__()
        self.inference, self.rule, self.recipe = inference, rule, recipe
        self.class_names, self.shape = class_names, shape
        self.mean, self.std = preprocessing(recipe)
        self.eval()

    @staticmethod
    def of(inference: Inference, rule: Part, broadcast: Broadcast) -> GlobalModel:
        return GlobalModel(inference, rule, broadcast.recipe, broadcast.class_names, broadcast.shape)

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.inference((images - self.mean) / self.std)
        return scores

    @torch.inference_mode()
    def predict(self, pixels: Tensor) -> Tensor:
        """uint8 pixels (n, channels, height, width) → class probabilities (n, classes)"""
        scores: Tensor = self(pixels.float() / 255)
        return scores.softmax(1)

    def read_image(self, path: Path) -> Tensor:
        """An image file as the model takes it: uint8 (channels, height, width), scaled to fit."""
        channels, height, width = self.shape
        pixels = decode_image(str(path), path.read_bytes, (width, height), channels)
        return torch.from_numpy(pixels.transpose(2, 0, 1).copy())

    # --- on disk -------------------------------------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        """A folder with a manifest and one safetensors file per network, written one at a time."""
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("shard_*.safetensors"):
            old.unlink()
        shards = []
        for number, tensors in enumerate(self.inference.shards()):
            name = f"shard_{number:03d}.safetensors"
            raw = blob.pack("shard", tensors, {})
            blob.write_durably(folder / name, raw)
            shards.append({"file": name, "bytes": len(raw), "sha256": blob.checksum(tensors)})
        manifest = {
            "format": blob.FORMAT,
            "kind": "global-model",
            "rule": self.rule.dump(),
            "recipe": self.recipe.plain(),
            "recipe_digest": self.recipe.digest,
            "class_names": list(self.class_names),
            "shape": list(self.shape),
            "preprocessing": {"scale": "0…1", "mean": self.mean, "std": self.std},
            "shards": shards,
        }
        whole = {**manifest, "sha256": _checksum(manifest)}
        blob.write_durably(folder / MANIFEST, json.dumps(whole, indent=1, ensure_ascii=False).encode())

    @staticmethod
    def load(folder: Path, *, streamed: bool = False) -> GlobalModel:
        """A saved model. `streamed`: keep one network in memory at a time, for scoring very large ensembles."""
        path = folder / MANIFEST if folder.is_dir() else folder
        if path.name != MANIFEST or not path.is_file():
            raise ProtocolError(f"{folder}: not a saved model (no {MANIFEST} in it)")
        try:
            manifest = json.loads(path.read_text(encoding="utf-8"))
            if manifest["format"] != blob.FORMAT or manifest["kind"] != "global-model":
                raise ProtocolError(
                    f"{path}: refused, {manifest['kind']} of format {manifest['format']}; this version reads format {blob.FORMAT}"
                )
            if manifest.pop("sha256") != _checksum(manifest):
                raise ProtocolError(f"{path}: refused, its content does not match its checksum")
            recipe = parse_federated(manifest["recipe"])
            rule = slot("fusion").parse(manifest["rule"])
            channels, height, width = manifest["shape"]
            names = tuple(manifest["class_names"])
            shards = ShardFolder(path.parent, manifest["shards"])
        except RecipeError as error:
            raise ProtocolError(f"{path}: {error}; if a plug-in brings it, name its module (--plugin)") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            what = f"{error} is missing in it" if isinstance(error, KeyError) else "it is cut off or was edited"
            raise ProtocolError(f"{path}: refused, damaged ({what}); make the model again: oneround fuse RUN") from None
        try:
            inference = rule.restore(shards, recipe, channels, len(names), streamed)
        except RuntimeError as error:  # load_state_dict: names or shapes differ
            raise ProtocolError(
                f"{path}: refused, its tensors do not fit its recipe ({' '.join(str(error).split())[:200]})"
            ) from None
        return GlobalModel(inference, rule, recipe, names, (channels, height, width))

    def to_onnx(self, path: Path) -> float:
        """Write an ONNX file and run it once; returns the largest difference to this model's own scores."""
        try:
            import onnx
            import onnxruntime
        except ImportError:
            raise ProtocolError(
                "ONNX export needs the packages onnx, onnxscript and onnxruntime: pip install 'oneround[onnx]'"
            ) from None
        if isinstance(self.inference, Ensemble):
            self.inference.settle()
        model = self.cpu().eval()
        example = torch.rand(3, *self.shape, generator=torch.Generator().manual_seed(0))
        batch = torch.export.Dim("batch", min=1, max=4096)
        path.parent.mkdir(parents=True, exist_ok=True)
        with _quiet():
            torch.onnx.export(
                model, (example,), str(path), input_names=["images"], output_names=["scores"],
                dynamic_shapes={"images": {0: batch}}, dynamo=True, verbose=False, external_data=False,
            )  # fmt: skip
        written = onnx.load(str(path))
        onnx.helper.set_model_props(written, {"class_names": json.dumps(list(self.class_names)), "input": "floats 0…1"})
        onnx.save(written, str(path))
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        checked = torch.cat([example, example.flip(2)])[:5]  # another batch size than the one it was traced with
        with torch.inference_mode():
            ours = model(checked).numpy()
        theirs: Any = session.run(None, {"images": checked.numpy()})[0]
        return float(np.abs(ours - theirs).max())


@contextmanager
def _quiet() -> Iterator[None]:
    """The exporter tells of libraries it does not need and of its own old calls."""
    teller = logging.getLogger("torch.onnx")
    before = teller.level
    teller.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        teller.setLevel(before)


def _checksum(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


class ShardFolder(Sequence[dict[str, Tensor]]):
    """The tensors of a saved model, read and checked a file at a time."""

    def __init__(self, folder: Path, listed: list[dict[str, Any]]) -> None:
        self.folder, self.listed = folder, listed

    def __len__(self) -> int:
        return len(self.listed)

    @overload
    def __getitem__(self, at: int) -> dict[str, Tensor]: ...

    @overload
    def __getitem__(self, at: slice) -> ShardFolder: ...

    def __getitem__(self, at: int | slice) -> dict[str, Tensor] | ShardFolder:
        if isinstance(at, slice):
            return ShardFolder(self.folder, self.listed[at])
        entry = self.listed[at]
        path = self.folder / Path(str(entry["file"])).name
        _, tensors = blob.read(path, "shard", int(entry["bytes"]))
        if blob.checksum(tensors) != entry["sha256"]:
            raise ProtocolError(f"{path}: refused, it is not the file its manifest lists")
        return tensors

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for at in range(len(self)):
            yield self[at]
