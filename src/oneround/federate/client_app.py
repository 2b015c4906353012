"""The ClientApp: trains once per broadcast (one a round), keeps its upload, and sends it again when asked again.

A new process serves each message, so all state is on disk, in a subfolder of the site's folder for each broadcast: `state.safetensors`
during training, `upload.safetensors` after it, `counted.json` with the server's verdict. `refused.json` says why a site cannot take part.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shutil
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from oneround.errors import DataError, DataMismatch, OneroundError, ProtocolError
from oneround.federate.messages import blob_of, fields_of, pack_message
from oneround.federate.sites import REFUSED, SiteFile, site_of
from oneround.files import logging_to, write_durably
from oneround.privacy import key_agreement

if TYPE_CHECKING:  # PyTorch is loaded by the process that trains, not by those that answer a question
    from oneround.config.recipe import Federated
    from oneround.data import Dataset, Images, Split
    from oneround.protocol import Broadcast

app = ClientApp()
log = logging.getLogger("oneround")


@app.train()
def train(message: Message, context: Context) -> Message:
    """Answer a broadcast with an upload: the one kept from before, or one trained now."""
    site = site_of(context.node_config)
    with _logging(site):
        try:
            fields = fields_of(message)
            participants = json.loads(fields.get("participants", "[]"))
            if participants and site.name not in participants:
                log.info("%s takes no part in this round", site.name)
                return _reply(message, site, {"not drawn": "yes"})
            if site.name in json.loads(fields.get("received", "{}")):
                log.info("the server has the upload of %s already", site.name)
                return _reply(message, site, {"received": "yes"})
            return _reply(message, site, raw=_upload(blob_of(message), site))
        except OneroundError as error:
            return _refusal(message, site, error)


@app.query("key")
def key(message: Message, context: Context) -> Message:
    """Answer with this site's public key for that federation, from which the other sites derive their masks."""
    site = site_of(context.node_config)
    with _logging(site):
        try:
            public_key = key_agreement.public_key(site.folder, fields_of(message).get("run", ""))
            return _reply(message, site, {"key": public_key})
        except OneroundError as error:
            return _refusal(message, site, error)


@app.query("histogram")
def histogram(message: Message, context: Context) -> Message:
    """Answer with this site's class histogram, as the recipe discloses it; the same again when it is asked again."""
    site = site_of(context.node_config)
    with _logging(site):
        try:
            return _reply(message, site, {"histogram": _histogram(blob_of(message), site)})
        except OneroundError as error:
            return _refusal(message, site, error)


@app.query("standing")
def standing(message: Message, context: Context) -> Message:
    """Answer a ping. Sites reply in order, so an answer without a preceding upload tells the server that its instruction is lost."""
    return _reply(message, site_of(context.node_config))


@app.query("counted")
def counted(message: Message, context: Context) -> Message:
    """Record the server's verdict on the upload."""
    site, fields = site_of(context.node_config), fields_of(message)
    with _logging(site):
        log.info("the server's verdict: %s", fields.get("text", ""))
    if site.folder is not None:
        digest = re.sub(r"[^0-9a-f]", "", fields.get("broadcast", ""))[:16]
        _write_json(site.folder / digest / "counted.json", {key: fields.get(key, "") for key in ("counted", "text")})
    return _reply(message, site)


def _reply(message: Message, site: SiteFile, fields: Mapping[str, str] | None = None, raw: bytes = b"") -> Message:
    return Message(pack_message({"name": site.name, **(fields or {})}, raw), reply_to=message)


def _refusal(message: Message, site: SiteFile, error: OneroundError) -> Message:
    """Report an error to the server, to the site's log and, as JSON, to the command that runs this site."""
    log.error("%s", error)
    if site.folder is not None:
        _write_json(site.folder / REFUSED, {"error": str(error)})
    return _reply(message, site, {"refused": f"{site.name}: {_without_paths(error, site)}"})


class OwnData(DataError):
    """An error about a site's own files; its text does not leave the site."""


def _without_paths(error: OneroundError, site: SiteFile) -> str:
    """The text of an error for the server: names and content of a site's files stay at the site."""
    message = str(error).removeprefix(f"{site.data}: ")
    private = isinstance(error, OwnData) or re.search(r"[/\\]", message)
    return "cannot take part; the reason is in the site's own log" if private else message


def _write_json(path: Path, content: dict[str, Any]) -> None:
    write_durably(path, json.dumps(content).encode())


def _upload(raw: bytes, site: SiteFile) -> bytes:
    """The packed upload for this broadcast: kept from before, or trained now."""
    from oneround import acts
    from oneround.config.parts import load_plugin
    from oneround.protocol import Broadcast, Upload, blob
    from oneround.site import Site

    for module in site.local.plugins:
        load_plugin(module)
    broadcast = Broadcast.unpack(raw)
    recipe, masker = broadcast.recipe, None
    if broadcast.masked:
        roster, digest, context = broadcast.roster, broadcast.digest, broadcast.context
        masker = key_agreement.masker_of(site.name, site.folder, roster, digest, context)
    folder = site.folder / hashlib.sha256(raw).hexdigest()[:16] if site.folder else None
    if folder:
        upload_file = folder / "upload.safetensors"
        states = [folder / f"{name}.safetensors" for name in ("state", "generator")]
        if upload_file.is_file():
            kept = upload_file.read_bytes()
            try:
                Upload.unpack(kept, broadcast, acts.statistics_of(broadcast), str(upload_file))
                log.info("trained before; the upload that was kept is sent again")
                return kept
            except ProtocolError as error:
                log.warning("%s; trained again", error)
        for state in states:
            if not blob.is_whole(state, "state"):
                state.unlink(missing_ok=True)
    images, validation = _images(broadcast, site)
    suffix = f", round {broadcast.round} of {recipe.exchanges}" if recipe.exchanges > 1 else ""
    epochs = broadcast.last_epoch - broadcast.first_epoch
    log.info("%s of %s%s: %d images, %d epochs", site.name, recipe.method, suffix, len(images), epochs)
    local_site = Site(site.name, images, folder, site.local, validation=validation, masker=masker)
    packed = acts.train(broadcast, local_site, emit=_log_event).pack()
    if folder:
        write_durably(upload_file, packed)
        for state in states:
            state.unlink(missing_ok=True)
        if recipe.exchanges > 1:
            _remove_earlier_rounds(folder, broadcast)
    return packed


def _histogram(raw: bytes, site: SiteFile) -> str:
    """The site's class counts as JSON; kept, because noise drawn twice would say more."""
    from oneround.privacy.disclosure import disclosed_counts
    from oneround.protocol import Broadcast

    kept = site.folder / hashlib.sha256(raw).hexdigest()[:16] / "histogram.json" if site.folder else None
    if kept and kept.is_file():
        return kept.read_text()
    broadcast = Broadcast.unpack(raw)
    counts = _images(broadcast, site)[0].class_counts(broadcast.classes)
    text = json.dumps(disclosed_counts(counts, broadcast.recipe.reveal).tolist())
    if kept:
        write_durably(kept, text.encode())
    return text


def _remove_earlier_rounds(folder: Path, broadcast: Broadcast) -> None:
    """Write down the round of this folder; remove the folders of earlier rounds."""
    for note in folder.parent.glob("*/round.json"):
        content = json.loads(note.read_text())
        if content["recipe"] == broadcast.digest and content["round"] < broadcast.round:
            shutil.rmtree(note.parent)
    _write_json(folder / "round.json", {"recipe": broadcast.digest, "round": broadcast.round})


def _images(broadcast: Broadcast, site: SiteFile) -> tuple[Images, Images | None]:
    """Training and validation images: the site's own, or in a test on one machine its share of the recipe's data set."""
    from oneround.data import own_images

    recipe = broadcast.recipe
    if site.data is not None:
        try:
            own = own_images(site.data, broadcast.class_names, broadcast.shape, site.labels)
            return _held_back(own, recipe, site.name) if recipe.sums and recipe.sums.held_back else (own, None)
        except DataError as error:
            raise error if isinstance(error, DataMismatch) else OwnData(str(error)) from None
    data, split = _partitioned(recipe.model_dump_json(), site.local.data_path)
    assert site.share is not None
    if site.share >= len(split.clients) or not len(split.clients[site.share]):
        raise DataError(f"share {site.share} of {recipe.partition.label} has no images; this site takes no part")
    held_back = split.client_validation[site.share]
    return data.train.take(split.clients[site.share]), data.train.take(held_back) if len(held_back) else None


def _held_back(own: Images, recipe: Federated, name: str) -> tuple[Images, Images | None]:
    """A site's own images without those it holds back, and these: the same in both exchanges."""
    from oneround.data.partition import hold_back
    from oneround.seeds import derive

    kept, chosen = hold_back(len(own), recipe.validation, derive(recipe.seeds.partition, name, "validation"))
    return own.take(kept), own.take(chosen) if len(chosen) else None


@lru_cache(maxsize=1)
def _partitioned(recipe: str, path: Path | None) -> tuple[Dataset, Split]:
    """The recipe's data set and its split; computed once in a process that serves many sites, as in Flower's simulation."""
    from oneround.config.load import parse_federated
    from oneround.data import load_dataset
    from oneround.server.plan import deal

    federated = parse_federated(json.loads(recipe))
    return deal(federated, load_dataset(federated.data, path))


def _log_event(event: dict[str, Any]) -> None:
    if event["event"] == "epoch":
        loss = f"loss {event['loss']:.4f}, " if "loss" in event else ""  # there is none where nothing is trained
        log.info("epoch %d: %s%.1f s", event["epoch"], loss, event["seconds"])
    elif event["event"] == "trouble":
        log.warning(event["text"])


def _logging(site: SiteFile) -> AbstractContextManager[None]:
    """A context that logs to `site.log` in the site's folder."""
    if site.folder is None:
        return nullcontext()
    site.folder.mkdir(parents=True, exist_ok=True)
    return logging_to(site.folder / "site.log")
