"""A checkpoint's tensors, put into a model one by one: each is checked, cast and, where asked for, quantised as it
comes, so that loading needs little more than what the model takes in the end."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

from rcd.errors import RCDError
from rcd.models.dtypes import wide
from rcd.models.lm import DiffusionLM
from rcd.models.quantise import Quantisation, quantised
from rcd.models.tensors import Piece, layout_of, put, shape_of

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
CODEBOOK, HEAD = "backbone.embed_tokens.weight", "head.weight"


class Filling:
    """What has come so far. `computed`: the dtype of activations, and so of all that is not quantised; `grow`: rows of
    a token that was added are filled up."""

    def __init__(
        self, model: DiffusionLM, path: Path, device: torch.device, computed: torch.dtype,
        quantise: Quantisation | None = None, grow: bool = False,
    ):  # fmt: skip
        self.model, self.path, self.device, self.computed, self.quantise = model, path, device, computed, quantise
        self.grow = grow
        self.shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        self.layout = layout_of(model.spec, self.shapes)
        self.stored: dict[str, torch.dtype] = {}
        """The checkpoint's names, with the dtype of each on disk."""
        self._parts = dict.fromkeys(self.shapes, 0)
        for piece in (piece for pieces in self.layout.values() for piece in pieces):
            self._parts[piece.name] += 1
        self._held: dict[str, Tensor] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """One of the checkpoint's tensors."""
        pieces = self._checked(name, tensor)
        if self.grow and pieces[0].name in (CODEBOOK, HEAD):
            tensor = with_rows(tensor, pieces[0].shape[0])
        self.stored[name] = tensor.dtype
        put(self._held, self.shapes, pieces, tensor.to(self.device, self._kind(pieces[0].name, tensor.dtype)))
        for piece in pieces:
            self._parts[piece.name] -= 1
            if not self._parts[piece.name] and piece.name not in (CODEBOOK, HEAD):
                self._place(piece.name, self._held.pop(piece.name))

    def finish(self) -> dict[str, torch.dtype]:
        """Embeddings and head, which may be one; then nothing may be missing."""
        codebook, head = self._held.pop(CODEBOOK, None), self._held.pop(HEAD, None)
        tied = bool(getattr(self.model.backbone.config, "tie_word_embeddings", False)) and codebook is not None
        if tied and head is not None and codebook is not None:
            tied = torch.equal(head.to(codebook), codebook)
        spec = self.model.spec
        missing = [name for name in self.layout if name not in self.stored]
        missing = [name for name in missing if not (tied and name == spec.from_stock(HEAD))]
        if missing:
            raise RCDError(f"{self.path} lacks {len(missing)} tensor(s) of the family {spec.name}, first {missing[0]}.")
        assert codebook is not None
        self._place(CODEBOOK, codebook)
        if not tied:
            assert head is not None
            self._place(HEAD, head)
        elif self._method(HEAD) is not None:
            self._place(HEAD, codebook)
        else:
            self.model.head.weight = self.model.backbone.embed_tokens.weight  # type: ignore[assignment, union-attr]
        self.model.backbone.rotary_emb.to(self.device)
        self.model.quantised = None if self.quantise is None else str(self.quantise)
        return self.stored

    def _checked(self, name: str, tensor: Tensor) -> list[Piece]:
        """The tensor's place: it must be known, of the right shape, floats, and finite."""
        family = self.model.spec.name
        if name not in self.layout:
            raise RCDError(f"{self.path} holds the tensor {name}, which the family {family} does not have.")
        if name in self.stored:  # a part that comes twice would stand for one that never came
            raise RCDError(f"{self.path} holds the tensor {name} twice; download the checkpoint again.")
        expected, shape = shape_of(self.layout[name]), tuple(tensor.shape)
        grows = self.grow and self.layout[name][0].name in (CODEBOOK, HEAD)
        if shape != expected and not (grows and shape[1:] == expected[1:] and shape[0] <= expected[0]):
            raise RCDError(
                f"the tensor {name} of {self.path} has shape {list(shape)}, but its config.json means {list(expected)}."
            )
        if tensor.dtype not in FLOATS:
            raise RCDError(
                f"the tensor {name} of {self.path} is {tensor.dtype}; quantised weights are not read, only floats."
            )
        check_finite(tensor, name, self.path)
        return self.layout[name]

    def _method(self, name: str) -> str | None:
        return None if self.quantise is None else self.quantise.of(name, self.shapes[name])

    def _kind(self, name: str, stored: torch.dtype) -> torch.dtype:
        """The dtype in which a tensor is kept; one that is still to be quantised stays as exact as it is."""
        if self._method(name) is not None and name != CODEBOOK:
            return stored
        return wide(self.computed) if name.endswith(self.model.spec.wide) else self.computed

    def _place(self, name: str, tensor: Tensor) -> None:
        module, _, leaf = name.rpartition(".")
        parent, method = self.model.get_submodule(module), self._method(name)
        if method is not None:
            place_quantised(self.model, name, tensor, method, self.computed)
        elif leaf in parent._buffers:
            parent._buffers[leaf] = tensor
        else:
            setattr(parent, leaf, nn.Parameter(tensor, requires_grad=False))


def place_quantised(model: nn.Module, name: str, tensor: Tensor, method: str, dtype: torch.dtype) -> None:
    """In the place of a linear layer, whose bias stays (and may still be to come), or of all experts' matrices."""
    module, _, leaf = name.rpartition(".")
    parent = model.get_submodule(module)
    if tensor.dim() == 3:
        delattr(parent, leaf)
        setattr(parent, leaf, nn.ModuleList(quantised(matrix, method, dtype) for matrix in tensor))
        return
    above, _, own = module.rpartition(".")
    made = quantised(tensor, method, dtype)
    made.bias = parent.bias
    setattr(model.get_submodule(above), own, made)


def quantise_all(model: DiffusionLM, quantise: Quantisation | None) -> None:
    """The same for a model that is in memory, a weight at a time."""
    if quantise is None:
        return
    if model.quantised:
        raise RCDError(f"the model's weights are quantised already ({model.quantised}); leave quantize out.")
    dtype = model.codebook.dtype
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        method = None if name == CODEBOOK else quantise.of(name, tuple(parameter.shape))
        if method is not None:
            place_quantised(model, name, parameter.detach(), method, dtype)
    model.quantised = str(quantise)


def fill(
    model: DiffusionLM, named: Iterable[tuple[str, Tensor]], path: Path, device: torch.device, dtype: torch.dtype,
    quantise: Quantisation | None = None, grow: bool = False,
) -> dict[str, torch.dtype]:  # fmt: skip
    """Put the tensors in place. Returns their names and dtypes on disk."""
    filling = Filling(model, path, device, dtype, quantise, grow)
    for name, tensor in named:
        if not name.endswith(model.spec.unused):
            filling.add(name, tensor)
    return filling.finish()


def with_rows(tensor: Tensor, rows: int) -> Tensor:
    """New rows (a token that was added) begin as the mean of the others."""
    missing = rows - tensor.shape[0]
    if missing <= 0:
        return tensor
    mean = tensor.float().mean(0, keepdim=True).to(tensor.dtype)
    return torch.cat((tensor, mean.expand(missing, -1)))


def check_finite(tensor: Tensor, name: str, path: Path) -> None:
    """A sum is finite exactly when its terms are (or overflows, which the second look tells apart)."""
    if not bool(torch.isfinite(tensor.sum(dtype=torch.float32))) and not bool(torch.isfinite(tensor).all()):
        raise RCDError(f"the tensor {name} of {path} holds NaN or inf; the checkpoint is damaged.")
