"""A BERT of 2 layers of 32 with a small vocabulary, and a few articles."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, BertForMaskedLM, PreTrainedTokenizerFast

from cacheblend_lab.realm.model import RealmModel, Shape
from cacheblend_lab.realm.passages import Passage

TOWNS = ("Aberport", "Dalbury", "Glencliff", "Inkshire", "Oakstead", "Ravenness", "Tarnford", "Whitmouth")
SHAPE = Shape(query_tokens=24, passage_tokens=40, vector=16, span_tokens=4)


def articles() -> list[Passage]:
    """Make two passages about each of eight ships, which name the same town in different words."""
    found = []
    for number, town in enumerate(TOWNS):
        name = f"Ship {chr(65 + number)}{chr(65 + number)}"
        found.append(
            Passage(name, f"{name} was built in {1900 + number}. Her home port is {town}. The cook is Ida Moor.")
        )
        found.append(Passage(name, f"Every winter {name} returns to {town}. She carries salt."))
    return found


@pytest.fixture(scope="session")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a directory with a random BERT, as `--bert` takes it."""
    torch.set_num_threads(1)
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    # A trained vocabulary would vary with equal counts; here towns are two pieces, other words one.
    text = " ".join([*(f"{p.title} {p.text}" for p in articles()), "Where is the home port of who what when does ?"])
    words = set(re.findall(r"\w+|[^\w\s]", text.lower())) - {town.lower() for town in TOWNS}
    pieces = {piece for town in TOWNS for piece in (town[:4].lower(), f"##{town[4:]}")}
    letters = {letter for single in "abcdefghijklmnopqrstuvwxyz0123456789,.?!+'" for letter in (single, f"##{single}")}
    vocabulary = [*special, *sorted(words | pieces | letters)]
    made = Tokenizer(models.WordPiece({word: at for at, word in enumerate(vocabulary)}, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    made.decoder = decoders.WordPiece()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
    )
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=128,
        initializer_range=0.15,
        hidden_dropout_prob=0.1,
    )
    torch.manual_seed(0)
    directory = tmp_path_factory.mktemp("bert")
    BertForMaskedLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture
def headless(bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save the same BERT as an embedding model, without the masked-LM head."""
    directory = tmp_path_factory.mktemp("headless")
    BertForMaskedLM.from_pretrained(str(bert)).bert.save_pretrained(directory)
    PreTrainedTokenizerFast.from_pretrained(str(bert)).save_pretrained(directory)
    return directory


@pytest.fixture
def model(bert: Path) -> RealmModel:
    return RealmModel.create(str(bert), SHAPE).eval()


@pytest.fixture
def passages() -> list[Passage]:
    return articles()
