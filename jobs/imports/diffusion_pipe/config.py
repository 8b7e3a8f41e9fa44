"""diffusion-pipe's TOML: the rules of its table that are more than a row."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any, Final

from jobs.errors import UserError
from jobs.imports.common import data, models, training_keys
from jobs.imports.common.draft import Draft, as_number, flatten, is_unset
from jobs.imports.common.import_report import Entry, Kind
from jobs.imports.common.places import parse, read_beside
from jobs.imports.common.table import read_data, read_table, sentence, word_of
from jobs.imports.common.whose import DIFFUSION_PIPE, refuse_others
from jobs.spec.values.resolutions import sides_of

if TYPE_CHECKING:
    from pathlib import Path

TITLE: Final = DIFFUSION_PIPE
DATA: Final = read_data(__file__)

# All linear layers of the blocks, which get an adapter, in families whose layers have the same
# names there.
_SAME_NAMES: Final = ("flux", "sd3", "qwen_image", "auraflow")
_LAYERS: Final = rf"\w*transformer_blocks\.\d+\..*(?:{models.LINEAR})"
# Pixels of a token as it counts them, where they are not FLUX.1's.
_TOKENS: Final = {"flux2": 32, "hunyuanvideo15": 32, "2.2-ti2v-5b": 32, "ltx2": 64}
# Layers that get one in families whose names are others there.
_TARGETS: Final = {
    "ideogram4": (
        r"layers\.\d+\.(attention\.to_(q|k|v|out\.0)|feed_forward\.w[123]|adaln_modulation)"
    ),
    "krea2": (
        r".*_blocks\.\d+\.(attn\.to_(q|k|v|gate|out\.0)|ff\.(gate|up|down))|text_fusion\.projector"
        r"|txt_in\.linear_[12]"
    ),
}
_INSTEAD: Final = "set dataset or datasets"
_FIRST_FRAME: Final = "model.first_frame_conditioning_p"


def read(path: Path) -> Draft:
    """Convert a configuration to a job.

    Raises:
        UserError: It cannot be read, is of another tool, or is a dataset's.
    """
    values = parse(path, otherwise=".toml")
    refuse_others(values, path, TITLE)
    if not isinstance(values, dict) or not isinstance(values.get("model"), dict):
        raise UserError(
            f"{path} is not a diffusion-pipe config: it has no [model]",
            "give the file that names this one as its dataset",
        )
    theirs = flatten({str(k): v for k, v in values.items()}, keep=("eval_datasets",))
    draft = Draft(theirs, path.absolute().parent)
    is_lora = isinstance(values.get("adapter"), dict)
    draft.values["model_type"] = "lora" if is_lora else "full"
    draft.defaults = CONFIG.defaults_of(draft)
    if draft.theirs.get("model.type") == "sdxl":
        draft.defaults["model.text_encoder_1_lr"] = draft.theirs.get("optimizer.lr")
    CONFIG.apply(draft)
    for ours, key in (("learning_rate", "optimizer.lr"), ("optimizer", "optimizer.type")):
        if ours not in draft.values and not draft.theirs.get(key):
            draft.report.to_fill_in.append(f"{ours}: the config has no {key}")
    _take_sound(draft)
    draft.values["max_aspect_ratio"] = 0.0
    draft.assume("buckets", "images of any shape are cropped to one", max_aspect_ratio=0.0)
    if not is_lora:
        draft.assume("adapter", "without one, the full model is trained", model_type="full")
    return draft


# -- model and adapter -------------------------------------------------------------------------


def family(draft: Draft, key: str, value: Any) -> None:
    """Set the family, and the flavour that names of files tell."""
    name = DATA["families"].get(str(value).strip().lower())
    paths = [str(v) for k, v in draft.theirs.items() if k.startswith("model.") and k != key]
    text = " ".join(paths).lower()
    flavours = (f for word, f in DATA["flavours"].get(name, {}).items() if re.search(word, text))
    models.set_family(draft, key, name, next(flavours, None))
    if name and "model_flavour" in draft.values:
        flavour = draft.values["model_flavour"]
        draft.assume("model", "from the names of its files", model_flavour=flavour)


def directory(draft: Draft, key: str, value: Any) -> None:
    """Take a directory in the layout of diffusers."""
    flavour = draft.values.get("model_flavour")
    models.set_model(draft, key, value)
    if flavour is not None:
        draft.values["model_flavour"] = flavour


def adapters(draft: Draft, key: str, value: Any) -> None:
    """LoRAs that are merged into the base while training, of which there can be one."""
    paths = value if isinstance(value, list) else [value]
    if len(paths) == 1:
        models.set_training_adapter(draft, key, paths[0])
    else:
        draft.unsupported(key, "one training_adapter")


def adapter(draft: Draft, key: str, value: Any) -> None:
    if word_of(value) == "lokr":
        draft.values["lora_variant"] = "lokr"
    name = models.family_of(draft).name
    targets = _TARGETS.get(name, _LAYERS if name in _SAME_NAMES else None)
    if targets:
        draft.take(key, "lora_target_modules", [targets], "all linear layers of the blocks")
    else:
        draft.unsupported(key, sentence("named_otherwise"))


def encoder_rate(draft: Draft, key: str, value: Any) -> None:
    """Take the rates of SDXL's text encoders, which are always trained there."""
    first, second = (
        draft.get(f"model.text_encoder_{n}_lr")
        if not is_unset(draft.get(f"model.text_encoder_{n}_lr"))
        else draft.get("optimizer.lr")
        for n in (1, 2)
    )
    if as_number(first) == as_number(second) == 0:
        draft.unneeded(key, "text encoders are not trained")
    elif as_number(first) != as_number(second):
        draft.unsupported(key, "all text encoders have the same rate")
    else:
        training_keys.text_encoder_lora(draft, key, draft.number("adapter.rank") or 16)
        if draft.values.get("text_encoder_lora_rank"):
            draft.values["text_encoder_learning_rate"] = as_number(first)


def _take_sound(draft: Draft) -> None:
    """Train the sound of MiniMax-H3's videos, which that tool does without being asked."""
    values = draft.values
    if models.family_of(draft).name != "minimax_h3" or (values.get("num_frames") or 1) == 1:
        return
    if values.get("loss_type", "mse") != "mse" or values.get("masked_loss", "none") != "none":
        why = "videos are trained without their sound, which takes the loss mse without masks"
        draft.report.assumed.append(Entry(Kind.UNSUPPORTED, "sound", "", {}, why))
    else:
        values["train_audio"] = True
        why = "if videos have it; the loss is a sum here, and weighted by tokens there"
        draft.assume("sound", why, train_audio=True)


# -- noise and training ------------------------------------------------------------------------


def has_shift(draft: Draft, key: str) -> bool:
    """Whether the shift that a key stands for is asked for, and used for the model."""
    ignored = DATA["ignored_shifts"].get(key.rpartition(".")[2], [])
    return draft.on(key) and models.family_of(draft).name not in ignored


def moves(draft: Draft, key: str) -> bool:
    """Whether sigma is shifted."""
    return any(has_shift(draft, f"model.{name}") for name in DATA["ignored_shifts"])


def by_size(draft: Draft, key: str, value: Any) -> None:
    """Take a shift by the tokens of an image, or of a frame of a video."""
    sides = sides_of(draft.values.get("resolution") or 1024)
    kind = draft.values.get("model_flavour"), models.family_of(draft).name
    token = next((_TOKENS[name] for name in kind if name in _TOKENS), training_keys.FLUX_TOKEN)
    training_keys.take_shift_by_size(draft, key, sides, token=token)


def end(draft: Draft, key: str, value: Any, *, ours: str, usual: float) -> None:
    """Take an end of the range that sigma is drawn from."""
    flavour = str(draft.values.get("model_flavour"))
    if as_number(value) != usual:
        draft.take(key, ours, value, "within the range of the model")
    elif flavour.endswith("-low" if usual else "-high"):
        draft.unsupported(key, "an expert is trained on its own noise levels only")
    else:
        draft.unneeded(key, "all noise levels of the model are trained")


def batch(draft: Draft, key: str, value: Any) -> None:
    """One number, or one for each resolution."""
    if not isinstance(value, list):
        draft.take(key, "train_batch_size", value)
        return
    sizes = {str(pair[1]) for pair in value if isinstance(pair, list) and len(pair) == 2}
    if len(sizes) == 1:
        draft.take(key, "train_batch_size", sizes.pop(), "the same at all resolutions")
    else:
        draft.unsupported(key, "train_batch_size is the same at all resolutions")


# -- the dataset file --------------------------------------------------------------------------


def read_file(draft: Draft, key: str, value: Any) -> None:
    """Read the directories of the file that a key names."""
    file = read_beside(draft, key, value, dict, _INSTEAD)
    if file is None:
        return
    path, values = file
    entries = values.get("directory")
    if not isinstance(entries, list) or not entries:
        draft.unreadable(key, f"{path.name} has no [[directory]]; {_INSTEAD}")
        return
    draft.record(Kind.TAKEN, key, why="its directories follow")
    shared = {str(k): v for k, v in values.items() if k != "directory"}
    if models.family_of(draft).name == "ltxvideo" and draft.number(_FIRST_FRAME):
        shared["first_frame"] = draft.get(_FIRST_FRAME)
    parts = []
    for number, entry in enumerate(entries):
        place = f"{path.name}[{number}]"
        if not isinstance(entry, dict):
            draft.unreadable(place, "not a directory")
            continue
        theirs = shared | {str(k): v for k, v in entry.items()}
        parts.append(data.read_part(draft, place, theirs, DIRECTORY))
    data.settle(draft, parts)


def resolutions(part: Draft, key: str, value: Any) -> None:
    """Sides of squares, or sizes of which only the area counts; every image is trained at each."""
    given = value if isinstance(value, list) else [value]
    sides: list[int] = []
    for size in given:
        numbers = (
            [as_number(side) for side in size] if isinstance(size, list) else [as_number(size)]
        )
        pixels = [number for number in numbers if number is not None and number > 0]
        if len(pixels) != len(numbers) or len(pixels) not in (1, 2):
            part.unreadable(key, "not sides of squares, or widths and heights")
            return
        sides.append(round(math.sqrt(pixels[0] * pixels[-1])))
    areas = any(isinstance(size, list) for size in given)
    part.take(key, "resolution", sides, "of the same area" if areas else "the equivalent key")


def ratio(part: Draft, key: str, value: Any) -> None:
    """Take the ratio of the widest or tallest bucket."""
    low, high = (part.number("min_ar") or 0.5, part.number("max_ar") or 2.0)
    if not part.on("enable_ar_bucket") or low <= 0:
        part.unneeded(key, "there are no buckets")
    else:
        widest = max(1.0, round(max(high, 1 / low), 4))
        part.take(key, "max_bucket_aspect_ratio", widest, "the larger of max_ar and 1 / min_ar")


def frames(part: Draft, key: str, value: Any) -> None:
    """Lengths of videos, of which a job has one."""
    given = value if isinstance(value, list) else [value]
    counts = sorted({int(n) for n in map(as_number, given) if n is not None and n > 1})
    if not counts or not models.family_of(part).frame_step:
        part.unneeded(key, "images are videos of one frame")
        return
    data.frames(part, key, counts[-1])
    if len(counts) > 1:
        part.unsupported(key, f"all videos have {counts[-1]} frames; shorter ones are skipped")


def prefix(part: Draft, key: str, value: Any) -> None:
    """Take a beginning of all captions; a comma after a trigger word is put there here."""
    word = str(value).strip()
    if word.endswith(",") and "," not in word[:-1]:
        part.take(key, "trigger_word", word[:-1].strip(), "in front of captions without it")
    else:
        part.unsupported(key, "write it into the captions, or set trigger_word")


CONFIG: Final = read_table(__file__, "config", globals())
DIRECTORY: Final = read_table(__file__, "directory", globals())
