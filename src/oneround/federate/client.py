"""The ClientApp: trains once per broadcast (one a round), keeps what it trained, sends it again when asked again.

A new process serves each message, so everything lies in the site's folder, in a folder of its own for each broadcast:
`state.safetensors` while it trains, `upload.safetensors` once it has, `counted.json` when the server has it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from oneround.errors import DataError, OneroundError, ProtocolError, UnlikeData
from oneround.federate import pairing
from oneround.federate.carrying import blob_of, parcel, words_of
from oneround.federate.sites import SiteFile, site_of

if TYPE_CHECKING:  # PyTorch is loaded by the process that trains, not by those that answer a question
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
            words = words_of(message)
            wanted = json.loads(words.get("wanted", "[]"))
            if wanted and site.name not in wanted:
                log.info("%s takes no part in this round", site.name)
                return Message(parcel({"name": site.name, "resting": "yes"}), reply_to=message)
            if site.name in json.loads(words.get("held", "{}")):
                log.info("the server has the upload of %s already", site.name)
                return Message(parcel({"name": site.name, "held": "yes"}), reply_to=message)
            return Message(parcel({"name": site.name}, _upload(blob_of(message), site)), reply_to=message)
        except OneroundError as error:
            return _refusal(message, site, error)


def _refusal(message: Message, site: SiteFile, error: OneroundError) -> Message:
    log.error("%s", error)
    return Message(
        parcel({"name": site.name, "refused": f"{site.name}: {_without_paths(error, site)}"}), reply_to=message
    )


class OwnData(DataError):
    """Something about a site's own files, which is nobody else's business."""


def _without_paths(error: OneroundError, site: SiteFile) -> str:
    """What the server may know of it: how a site's files are called, and what is in them, stays at the site."""
    told = str(error).removeprefix(f"{site.data}: ")
    private = isinstance(error, OwnData) or re.search(r"[/\\]", told)
    return "cannot take part as it is; its own log says why" if private else told


@app.query("key")
def key(message: Message, context: Context) -> Message:
    """This site's public key for that federation, for the others to mask with."""
    site = site_of(context.node_config)
    with _logging(site):
        try:
            own = pairing.public_key(site, words_of(message).get("run", ""))
            return Message(parcel({"name": site.name, "key": own}), reply_to=message)
        except OneroundError as error:
            return _refusal(message, site, error)


@app.query("standing")
def standing(message: Message, context: Context) -> Message:
    """Answered at once by a site that has nothing to do: so the server learns that its instruction was lost."""
    return Message(parcel({"name": site_of(context.node_config).name}), reply_to=message)


@app.query("counted")
def counted(message: Message, context: Context) -> Message:
    """The server says what became of the upload."""
    site, words = site_of(context.node_config), words_of(message)
    with _logging(site):
        log.info("the server says: %s", words.get("text", ""))
    if site.folder is not None:
        place = site.folder / re.sub(r"[^0-9a-f]", "", words.get("broadcast", ""))[:16]
        place.mkdir(parents=True, exist_ok=True)
        (place / "counted.tmp").write_text(json.dumps({key: words.get(key, "") for key in ("counted", "text")}))
        (place / "counted.tmp").replace(place / "counted.json")
    return Message(parcel({"name": site.name}), reply_to=message)


def _upload(raw: bytes, site: SiteFile) -> bytes:
    """The upload to this broadcast as it travels."""
    from oneround.acts import statistics_of
    from oneround.acts import train as train_site
    from oneround.parts import load_plugin
    from oneround.protocol import Broadcast, Upload, blob
    from oneround.site import Site

    for module in site.local.plugins:
        load_plugin(module)
    broadcast = Broadcast.unpack(raw)
    masker = pairing.masker_of(site, broadcast) if broadcast.recipe.secure else None
    place = site.folder / hashlib.sha256(raw).hexdigest()[:16] if site.folder else None
    kept = place / "upload.safetensors" if place else None
    if kept and kept.is_file():
        again = kept.read_bytes()
        try:
            Upload.unpack(again, broadcast, statistics_of(broadcast), str(kept))
            log.info("trained before; the upload that was kept is sent again")
            return again
        except ProtocolError as error:
            log.warning("%s; trained again", error)
    if place and not blob.is_whole(place / "state.safetensors", "state"):
        (place / "state.safetensors").unlink(missing_ok=True)
    images, held = _images(broadcast, site)
    recipe, number = broadcast.recipe, broadcast.round
    told = f", round {number} of {recipe.rounds}" if recipe.rounds > 1 else ""
    log.info("%s of %s%s: %d images, %d epochs", site.name, recipe.method, told, len(images), recipe.training.epochs)
    here = Site(site.name, images, place, site.local, validation=held, masker=masker)
    upload = train_site(broadcast, here, emit=_tell)
    sent = upload.pack()
    if kept:
        blob.write_durably(kept, sent)
        (kept.parent / "state.safetensors").unlink(missing_ok=True)
        _forget_round_before(kept.parent, broadcast)
    return sent


def _forget_round_before(place: Path, broadcast: Broadcast) -> None:
    """Note which round this folder is of; those of earlier rounds are not needed any more."""
    if broadcast.recipe.rounds == 1:
        return
    for note in place.parent.glob("*/round.json"):
        told = json.loads(note.read_text())
        if told["recipe"] == broadcast.digest and told["round"] < broadcast.round:
            shutil.rmtree(note.parent)
    (place / "round.json").write_text(json.dumps({"recipe": broadcast.digest, "round": broadcast.round}))


def _images(broadcast: Broadcast, site: SiteFile) -> tuple[Images, Images | None]:
    """The site's own images, or its share of the recipe's data set in a try-out; and what it holds back of them."""
    from oneround.data import own_images

    recipe = broadcast.recipe
    if site.data is not None:
        try:
            return own_images(site.data, broadcast.class_names, broadcast.shape, site.labels), None
        except DataError as error:
            raise error if isinstance(error, UnlikeData) else OwnData(str(error)) from None
    data, split = _dealt(recipe.model_dump_json(), site.local.data_path)
    assert site.share is not None
    if site.share >= len(split.clients) or not len(split.clients[site.share]):
        raise DataError(f"share {site.share} of {recipe.partition.label} has no images; this site takes no part")
    held = split.held[site.share]
    return data.train.take(split.clients[site.share]), data.train.take(held) if len(held) else None


@lru_cache(maxsize=1)
def _dealt(recipe: str, path: Path | None) -> tuple[Dataset, Split]:
    """The recipe's data set and who holds what of it; once in a process that serves many sites, as in Flower's simulation."""
    from oneround.data import load_dataset, partitions
    from oneround.reading import parse_federated
    from oneround.runs import mislabelled

    told = parse_federated(json.loads(recipe))
    data = load_dataset(told.data, path)
    split = partitions.of(told.partition).split(
        data, told.seeds.partition, told.public, told.validation, told.clients_hold_back
    )
    return mislabelled(told, data, split), split


def _tell(event: dict[str, Any]) -> None:
    if event["event"] == "epoch":
        loss = f"loss {event['loss']:.4f}, " if "loss" in event else ""  # there is none where nothing is trained
        log.info("epoch %d: %s%.1f s", event["epoch"], loss, event["seconds"])
    elif event["event"] == "trouble":
        log.warning(event["text"])


@contextmanager
def _logging(site: SiteFile) -> Iterator[None]:
    """`site.log` in the site's folder: what happened when, in words."""
    log.setLevel(logging.INFO)
    if site.folder is None:
        yield
        return
    site.folder.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(site.folder / "site.log", encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        handler.close()
