"""Parameter attention: a matrix of one network looks at a matrix of another and comes back changed, in its own shape.

MergeNet (Li et al., 2024). Student W_a (r × c) and teacher W_b (p × q) may have any shapes: rows and columns of W_a ask, rows and
columns of W_b answer, which makes four cross-attentions; their mean goes through a small feed-forward network row by row.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm

from oneround.parts import Strict
from oneround.sections import Count, Fraction, NotNegative, Positive


class Adapter(Strict):
    """Size and training of the adapter."""

    width: Count = 64
    """Of every attention head (d_attention)."""
    heads: Count = 8
    layers: Count = 2
    attention_dropout: Fraction = 0.1
    dropout: Fraction = 0.2
    """In the feed-forward part. Dropout acts while the adapter learns, never in what it hands out."""
    rescale: bool = True
    """Give every row the norm it had: the last layer norm makes rows of norm √columns, which batch norm hides but which slows
    learning. False: as published."""
    learning_rate: Annotated[NotNegative, Field(le=1e6)] = 0.001
    schedule: Literal["constant", "cosine"] = "constant"
    """Of the learning rate, over all fusions."""
    weight_decay: NotNegative = 0.01
    """Not on biases and norms."""
    clip_norm: Positive = 50.0
    """Largest norm of the adapter's gradient."""


class CrossAttention(nn.Module):
    """LayerNorm(query + W_o·dropout(softmax(QKᵀ/√width))V): tokens (n, asking) look at tokens (m, answering)."""

    def __init__(self, asking: int, answering: int, options: Adapter) -> None:
        super().__init__()
        inner = options.heads * options.width
        self.heads, self.dropout = options.heads, options.attention_dropout
        self.query, self.key, self.value = (nn.Linear(size, inner) for size in (asking, answering, answering))
        self.out, self.norm = nn.Linear(inner, asking), nn.LayerNorm(asking)

    def forward(self, tokens: Tensor, others: Tensor) -> Tensor:
        def split(projected: Tensor) -> Tensor:  # (n, heads·width) → (1, heads, n, width)
            return projected.view(len(projected), self.heads, -1).transpose(0, 1)[None]

        query, key, value = split(self.query(tokens)), split(self.key(others)), split(self.value(others))
        seen = F.scaled_dot_product_attention(query, key, value, dropout_p=self.dropout if self.training else 0.0)
        changed: Tensor = self.norm(tokens + self.out(seen[0].transpose(0, 1).flatten(1)))
        return changed


class Layer(nn.Module):
    """Four cross-attentions, averaged; then LayerNorm(x + dropout(FFN(x))) on rows."""

    def __init__(self, student: tuple[int, int], teacher: tuple[int, int], options: Adapter) -> None:
        super().__init__()
        (rows, columns), (other_rows, other_columns) = student, teacher
        # Rows are tokens as long as there are columns, and the other way round.
        self.by_row = nn.ModuleList(CrossAttention(columns, size, options) for size in (other_columns, other_rows))
        self.by_column = nn.ModuleList(CrossAttention(rows, size, options) for size in (other_columns, other_rows))
        wide, narrow = nn.Linear(columns, 2 * columns), nn.Linear(2 * columns, columns)
        self.feed = nn.Sequential(spectral_norm(wide), nn.GELU(approximate="tanh"), spectral_norm(narrow))
        self.dropout, self.norm = nn.Dropout(options.dropout), nn.LayerNorm(columns)

    def forward(self, matrix: Tensor, teacher: Tensor) -> Tensor:
        both = (teacher, teacher.T)
        seen = [ask(matrix, other) for ask, other in zip(self.by_row, both, strict=True)]
        seen += [ask(matrix.T, other).T for ask, other in zip(self.by_column, both, strict=True)]
        mean = torch.stack(seen).mean(0)
        out: Tensor = self.norm(mean + self.dropout(self.feed(mean)))
        return out


class ParameterAttention(nn.Module):
    """W_a, W_b → W_out in the shape of W_a."""

    def __init__(self, student: tuple[int, int], teacher: tuple[int, int], options: Adapter) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(student, teacher, options) for _ in range(options.layers))
        self.rescale = options.rescale

    def forward(self, matrix: Tensor, teacher: Tensor) -> Tensor:
        out = matrix
        for layer in self.layers:
            out = layer(out, teacher)
        if self.rescale:
            out = out * (matrix.norm(dim=1, keepdim=True) / out.norm(dim=1, keepdim=True).clamp(min=1e-12))
        return out
