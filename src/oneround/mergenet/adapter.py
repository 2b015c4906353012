"""Parameter attention: a matrix of one network attends to a matrix of another; the output has the shape of the first.

MergeNet (Li et al., 2024). Student W_a (r × c) and teacher W_b (p × q) may have any shapes: rows and columns of W_a are queries,
rows and columns of W_b keys and values, which makes four cross-attentions. Their mean goes through a small feed-forward network
row by row.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm

from oneround.config.sections import Adapter


class CrossAttention(nn.Module):
    """LayerNorm(query + W_o·dropout(softmax(QKᵀ/√width))V): tokens (n, query_size) attend to tokens (m, key_size)."""

    def __init__(self, query_size: int, key_size: int, options: Adapter) -> None:
        super().__init__()
        inner = options.heads * options.width
        self.heads, self.dropout = options.heads, options.attention_dropout
        self.query, self.key, self.value = (nn.Linear(size, inner) for size in (query_size, key_size, key_size))
        self.out, self.norm = nn.Linear(inner, query_size), nn.LayerNorm(query_size)

    def forward(self, tokens: Tensor, others: Tensor) -> Tensor:
        def split(projected: Tensor) -> Tensor:  # (n, heads·width) → (1, heads, n, width)
            return projected.view(len(projected), self.heads, -1).transpose(0, 1)[None]

        query, key, value = split(self.query(tokens)), split(self.key(others)), split(self.value(others))
        attended = F.scaled_dot_product_attention(query, key, value, dropout_p=self.dropout if self.training else 0.0)
        out: Tensor = self.norm(tokens + self.out(attended[0].transpose(0, 1).flatten(1)))
        return out


class Layer(nn.Module):
    """Four cross-attentions, averaged; then LayerNorm(x + dropout(FFN(x))) on rows."""

    def __init__(self, student: tuple[int, int], teacher: tuple[int, int], options: Adapter) -> None:
        super().__init__()
        (rows, columns), (other_rows, other_columns) = student, teacher
        # A row is a token of size columns, a column a token of size rows.
        self.by_row = nn.ModuleList(CrossAttention(columns, size, options) for size in (other_columns, other_rows))
        self.by_column = nn.ModuleList(CrossAttention(rows, size, options) for size in (other_columns, other_rows))
        wide, narrow = nn.Linear(columns, 2 * columns), nn.Linear(2 * columns, columns)
        self.feed = nn.Sequential(spectral_norm(wide), nn.GELU(approximate="tanh"), spectral_norm(narrow))
        self.dropout, self.norm = nn.Dropout(options.dropout), nn.LayerNorm(columns)

    def forward(self, matrix: Tensor, teacher: Tensor) -> Tensor:
        both = (teacher, teacher.T)
        attended = [attention(matrix, other) for attention, other in zip(self.by_row, both, strict=True)]
        attended += [attention(matrix.T, other).T for attention, other in zip(self.by_column, both, strict=True)]
        mean = torch.stack(attended).mean(0)
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
