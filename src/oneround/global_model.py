"""GlobalModel: the result, from images to class scores, with its preprocessing and class names inside."""

from __future__ import annotations

import hashlib
import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from oneround.config.load import parse_federated, parse_part
from oneround.config.parts import Part
from oneround.config.recipe import Federated
from oneround.data.augment import preprocessing
from oneround.data.files import decode_image
from oneround.errors import ProtocolError, RecipeError, printable, refused
from oneround.fusion.base import SavedModel, rules
from oneround.models import Ensemble, Inference
from oneround.protocol import blob
from oneround.protocol.messages import Broadcast

MANIFEST = "manifest.json"


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

    def read_image(self, path: str | PathLike[str]) -> Tensor:
        """An image file as the model takes it: uint8 (channels, height, width), scaled to fit."""
        path, (channels, height, width) = Path(path), self.shape
        pixels = decode_image(str(path), path.read_bytes, (width, height), channels)
        return torch.from_numpy(pixels.transpose(2, 0, 1).copy())

    # --- on disk -------------------------------------------------------------------------------------------------------

    def save(self, folder: str | PathLike[str], *, flush: bool = True) -> None:
        """Write a folder with a manifest and one safetensors file per network, one at a time.

        A file's name contains a digest of its content, so no other model's files are overwritten. The manifest is replaced
        last, and files that it does not list are removed after that. A save that is killed or refused leaves the folder's
        previous model intact. Without `flush` the files survive a crash of the program but not of the machine.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        shards = []
        for number, tensors in enumerate(self._finite_shards()):
            digest, pieces = blob.pieces("shard", tensors, {})
            name = f"shard_{number:03d}_{digest[:12]}.safetensors"
            blob.write_durably(folder / name, *pieces, flush=flush)
            shards.append({"file": name, "bytes": sum(map(len, pieces)), "sha256": digest})
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
        blob.write_durably(folder / MANIFEST, json.dumps(whole, indent=1, ensure_ascii=False).encode(), flush=flush)
        listed = {shard["file"] for shard in shards}
        for path in folder.glob("shard_*.safetensors"):
            if path.name not in listed:
                path.unlink()

    def _finite_shards(self) -> Iterator[dict[str, Tensor]]:
        for tensors in self.inference.shards():
            for name, tensor in tensors.items():
                if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                    raise ProtocolError(
                        f"the model of {self.rule.label} is refused, {name} holds values that are not finite"
                    )
            yield tensors

    def check_finite(self) -> None:
        """Refuse a model with values that are not finite; an ensemble's networks are checked one at a time."""
        for _ in self._finite_shards():
            pass

    @staticmethod
    def load(folder: str | PathLike[str], *, streamed: bool = False) -> GlobalModel:
        """Load a saved model. `streamed`: keep one network in memory at a time, for very large ensembles."""
        folder = Path(folder)
        path = folder / MANIFEST if folder.is_dir() else folder
        if path.name != MANIFEST or not path.is_file():
            raise ProtocolError(f"{folder}: not a saved model (no {MANIFEST} in it)")
        try:
            manifest = json.loads(path.read_text(encoding="utf-8"))
            version, kind = manifest["format"], manifest["kind"]
            if version != blob.FORMAT or kind != "global-model":
                raise refused(str(path), f"{kind} of format {version}; this version reads format {blob.FORMAT}")
            if manifest.pop("sha256") != _checksum(manifest):
                raise refused(str(path), "its content does not match its checksum")
            recipe = parse_federated(manifest["recipe"])
            rule = rules.of(parse_part("fusion", manifest["rule"]))
            channels, height, width = manifest["shape"]
            names = tuple(manifest["class_names"])
            shards = [partial(_read_shard, path.parent, entry) for entry in manifest["shards"]]
        except RecipeError as error:
            raise ProtocolError(f"{path}: {error}; if a plug-in brings it, name its module (--plugin)") from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            reason = f"{error} is missing in it" if isinstance(error, KeyError) else "it is cut off or was edited"
            raise refused(str(path), f"damaged ({reason}); make the model again: oneround fuse RUN") from None
        try:
            inference = rule.restore(SavedModel(shards, recipe, channels, len(names), streamed))
        except RuntimeError as error:  # load_state_dict: names or shapes differ
            raise refused(str(path), f"its tensors do not fit its recipe ({printable(str(error))})") from None
        return GlobalModel(inference, rule, recipe, names, (channels, height, width))

    def to_onnx(self, path: str | PathLike[str]) -> float:
        """Write an ONNX file, run it once and return the largest difference to this model's own scores."""
        try:
            import onnx
            import onnxruntime
        except ImportError:
            raise ProtocolError(
                "ONNX export needs the packages onnx, onnxscript and onnxruntime: pip install 'oneround[onnx]'"
            ) from None
        path = Path(path)
        if path.is_dir():  # known before minutes of tracing
            raise ProtocolError(f"{path}: that is a folder; give a file name")
        if isinstance(self.inference, Ensemble):
            self.inference.load_experts()
        model = self.cpu().eval()
        example = torch.rand(3, *self.shape, generator=torch.Generator().manual_seed(0))
        batch = torch.export.Dim("batch", min=1, max=4096)
        path.parent.mkdir(parents=True, exist_ok=True)
        with _quiet():
            torch.onnx.export(
                model,
                (example,),
                str(path),
                input_names=["images"],
                output_names=["scores"],
                dynamic_shapes={"images": {0: batch}},
                dynamo=True,
                verbose=False,
                external_data=False,
            )
        written = onnx.load(str(path))
        onnx.helper.set_model_props(written, {"class_names": json.dumps(list(self.class_names)), "input": "floats 0…1"})
        onnx.save(written, str(path))
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        checked = torch.cat([example, example.flip(2)])[:5]  # another batch size than the one it was traced with
        with torch.inference_mode():
            expected = model(checked).numpy()
        exported: Any = session.run(None, {"images": checked.numpy()})[0]
        return float(np.abs(expected - exported).max())


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporter's warnings about optional libraries and deprecated calls."""
    logger = logging.getLogger("torch.onnx")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)


def _checksum(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _read_shard(folder: Path, entry: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors of one file of a saved model, checked."""
    path = folder / Path(str(entry["file"])).name
    _, tensors = blob.read(path, "shard", int(entry["bytes"]))
    if blob.checksum(tensors) != entry["sha256"]:
        raise refused(str(path), "it is not the file its manifest lists")
    return tensors
