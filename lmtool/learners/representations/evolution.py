"""How representations change from layer to layer and between models (Voita, Sennrich and Titov, "The Bottom-up
Evolution of Representations in the Transformer", EMNLP 2019): the mutual information of a layer's states with tokens,
and the similarity of two sets of states by projection-weighted CCA (Morcos, Raghu and Bengio 2018).

Shape letters: N positions, M target positions of a batch, T tokens of a batch, H, G width of the states, C clusters, K
retained directions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lmtool.learners.metrics.intervals import interval, t_quantile
from lmtool.learners.representations.layers import LabeledStates, TokenTargets
from lmtool.random_streams import Permutation, uniform_at
from lmtool.types import Batch, Target

MASKED_FRACTION = 0.15
"""The fraction of the tokens that `MaskedTargets` masks, as in the pretraining of BERT."""
VARIANCE = 0.99
"""The fraction of the variance of the states that the retained principal directions have."""
SHUFFLES = 100
"""The number of shuffles from which the value of unrelated data is estimated."""
MAX_BLOCKS = 20
"""The maximum number of blocks of texts that the jackknife leaves out one at a time."""
ITERATIONS = 20
"""The number of iterations of k-means, each over all states."""
# Numbers of draws in the random stream "sample"; layers.py has 7 and 8.
_MASKS, _SHUFFLES = 9, 1000
# States whose distances from all centers are in memory at a time.
_ROWS_AT_ONCE = 8192


class MaskedTargets(TokenTargets):
    """The examples of `targets`, whose targets are the tokens themselves, with 15% of the frequent tokens replaced by
    the mask. The term `target` predicts these tokens at their positions."""

    def __init__(self, targets: TokenTargets, mask: int, seed: int):
        self.__dict__.update(vars(targets))
        self.mask, self.seed = mask, seed

    def batch(self, rows: np.ndarray, examples: np.ndarray, epoch: int) -> Batch:
        batch = super().batch(rows, examples, epoch)
        ((term, target),) = batch.targets.items()
        assert target.at is not None and target.labels is not None
        inputs = batch.inputs
        example_M = batch.examples[inputs.documents[target.at]].numpy()
        draws_M = uniform_at(self.seed, "sample", _MASKS, example_M, inputs.positions[target.at].numpy())
        chosen = torch.from_numpy(np.flatnonzero(draws_M < MASKED_FRACTION))
        masked = Target(target.labels[chosen], at=target.at[chosen])
        tokens_T = inputs.tokens.index_fill(0, target.at[chosen], self.mask)
        return replace(batch, inputs=replace(inputs, tokens=tokens_T), targets={term: masked})


@dataclass(frozen=True)
class Estimate:
    """A statistic of states, with its value for unrelated data.

    low, high: its 95% interval over texts: delete-one-block jackknife with Student's t. NaN for fewer than two texts. A
    bootstrap would not do: it repeats positions, which raises both statistics. shuffled: the mean over shuffles of the
    positions of one side; what unrelated data of this size has. shuffled_high: the upper end of the middle 95% of the
    shuffles.
    """

    value: float
    low: float
    high: float
    shuffled: float
    shuffled_high: float


def blocks_of(groups_N: np.ndarray) -> np.ndarray:
    """Returns the block (N,) of each position: at most MAX_BLOCKS blocks of whole texts. groups_N: the text of each
    position."""
    _, text_N = np.unique(groups_N, return_inverse=True)
    texts = int(text_N.max()) + 1
    return text_N * min(MAX_BLOCKS, texts) // texts


def _estimate(value: float, without: list[float], shuffled: list[float]) -> Estimate:
    blocks = len(without)
    half = float("nan")
    if blocks > 1:
        deviations = np.asarray(without) - np.mean(without)
        half = t_quantile(blocks - 1) * float(np.sqrt((blocks - 1) / blocks * np.square(deviations).sum()))
    return Estimate(value, value - half, value + half, float(np.mean(shuffled)), interval(shuffled).high)


def _shuffles(count: int, seed: int) -> Iterator[np.ndarray]:
    for shuffle in range(SHUFFLES):
        yield Permutation(count, seed, "sample", _SHUFFLES + shuffle)(np.arange(count))


# --- mutual information -------------------------------------------------------------------------------------------


def k_means(x_NH: Tensor, clusters: int, seed: int) -> Tensor:
    """Returns the cluster (N,) of each state by k-means: centers by k-means++ (Arthur and Vassilvitskii 2007), then
    ITERATIONS of Lloyd over all states. Fewer clusters result from fewer than `clusters` distinct states."""
    generator = torch.Generator().manual_seed(seed)
    x_NH = x_NH - x_NH.mean(0)
    squares_N = x_NH.square().sum(1)
    index = int(torch.randint(len(x_NH), (), generator=generator))
    nearest_N, centers = torch.full_like(squares_N, torch.inf), list[Tensor]()
    for _ in range(clusters):
        center_H = x_NH[index]
        centers.append(center_H)
        distance_N = squares_N - 2 * (x_NH @ center_H) + center_H.square().sum()
        # Below the rounding error of the difference, two states are the same.
        distance_N = torch.where(distance_N > 1e-6 * squares_N.mean(), distance_N, 0.0)
        nearest_N = torch.minimum(nearest_N, distance_N)
        cumulative_N = nearest_N.double().cumsum(0).cpu()
        if cumulative_N[-1] == 0:
            break
        draw = torch.rand((), generator=generator, dtype=torch.float64) * cumulative_N[-1]
        index = min(int(torch.searchsorted(cumulative_N, draw, right=True)), len(x_NH) - 1)
    centers_CH = torch.stack(centers)
    for _ in range(ITERATIONS):
        labels_N = _nearest(x_NH, centers_CH)
        sums_CH = torch.zeros_like(centers_CH).index_add_(0, labels_N, x_NH)
        sizes_C = torch.bincount(labels_N, minlength=len(centers_CH))[:, None]
        means_CH = torch.where(sizes_C > 0, sums_CH / sizes_C.clamp(min=1), centers_CH)
        if torch.equal(means_CH, centers_CH):
            break
        centers_CH = means_CH
    return _nearest(x_NH, centers_CH)


def _nearest(x_NH: Tensor, centers_CH: Tensor) -> Tensor:
    half_C = centers_CH.square().sum(1) / 2
    return torch.cat([(half_C - rows_MH @ centers_CH.T).argmin(1) for rows_MH in x_NH.split(_ROWS_AT_ONCE)])


def entropy(labels_N: np.ndarray) -> float:
    """Returns the entropy of labels in nats, from their frequencies."""
    _, counts = np.unique(labels_N, return_counts=True)
    fractions = counts / counts.sum()
    return float(-(fractions * np.log(fractions)).sum())


def mutual_information(first_N: np.ndarray, second_N: np.ndarray) -> float:
    """Returns the plug-in estimate of the mutual information in nats of two discrete variables, int64 from 0. It is
    biased upwards: compare it with its value for shuffled labels."""
    pairs_N = first_N * (int(second_N.max()) + 1) + second_N
    return max(entropy(first_N) + entropy(second_N) - entropy(pairs_N), 0.0)


def token_information(
    states_NH: Tensor, labels_N: np.ndarray, groups_N: np.ndarray, clusters: int, seed: int
) -> Estimate:
    """Returns the mutual information of the states of a layer and tokens, from the clusters of the states. labels_N:
    the token of each position, int64 from 0. groups_N: the text of each position. seed: that of the clustering and of
    the shuffles."""
    clusters_N, blocks_N = k_means(states_NH, clusters, seed).cpu().numpy(), blocks_of(groups_N)
    without = [
        mutual_information(clusters_N[kept_N], labels_N[kept_N])
        for kept_N in (blocks_N != block for block in range(int(blocks_N.max()) + 1))
        if kept_N.any()
    ]
    shuffled = [mutual_information(clusters_N, labels_N[order_N]) for order_N in _shuffles(len(labels_N), seed)]
    return _estimate(mutual_information(clusters_N, labels_N), without, shuffled)


# --- similarity by projection-weighted CCA --------------------------------------------------------------------------


class _Moments(NamedTuple):
    """Sums over positions, float64: their number, and the sums and products of both states."""

    n: int
    x_H: Tensor
    y_G: Tensor
    xx_HH: Tensor
    yy_GG: Tensor
    xy_HG: Tensor

    @classmethod
    def of(cls, x_NH: Tensor, y_NG: Tensor) -> _Moments:
        return cls(len(x_NH), x_NH.sum(0), y_NG.sum(0), x_NH.T @ x_NH, y_NG.T @ y_NG, x_NH.T @ y_NG)

    def without(self, block: _Moments) -> _Moments:
        return _Moments(self.n - block.n, *(all_ - part for all_, part in zip(self[1:], block[1:], strict=True)))

    def similarity(self) -> float:
        xx_HH = self.xx_HH - torch.outer(self.x_H, self.x_H) / self.n
        yy_GG = self.yy_GG - torch.outer(self.y_G, self.y_G) / self.n
        xy_HG = self.xy_HG - torch.outer(self.x_H, self.y_G) / self.n
        x_HK, y_GK = _whitening(xx_HH), _whitening(yy_GG)
        if not x_HK.shape[1] or not y_GK.shape[1]:
            return float("nan")  # constant states
        first_KK, correlations_K, second_KK = torch.linalg.svd(x_HK.T @ xy_HG @ y_GK, full_matrices=False)
        # A canonical variate counts by how much of the states it describes, on the side with fewer directions.
        first = x_HK.shape[1] <= y_GK.shape[1]
        projections = first_KK.T @ (x_HK.T @ xx_HH) if first else second_KK @ (y_GK.T @ yy_GG)
        weights_K = projections.abs().sum(1)
        return float((weights_K * correlations_K.clamp(max=1.0)).sum() / weights_K.sum())


def _whitening(products_HH: Tensor) -> Tensor:
    """Returns (H, K): the principal directions with VARIANCE of the variance, divided by their standard deviation."""
    values_H, directions_HH = torch.linalg.eigh(products_HH)
    values_H, directions_HH = values_H.flip(0).clamp(min=0), directions_HH.flip(1)
    if values_H[0] <= 0:
        return directions_HH[:, :0]
    fractions_H = values_H.cumsum(0) / values_H.sum()
    retained = min(int((fractions_H < VARIANCE).sum()) + 1, len(values_H))
    return directions_HH[:, :retained] / values_H[:retained].sqrt()


def pwcca(x_NH: Tensor, y_NG: Tensor) -> float:
    """Returns the projection-weighted CCA similarity of two sets of states at the same positions, between 0 and 1.

    Both sides are reduced to the principal directions with 99% of the variance. The result is the mean of the canonical
    correlations; the weight of a canonical variate is the sum of its absolute products with the states' dimensions, on
    the side with fewer directions, or on the first side. NaN if the states of one side are constant.
    """
    return _Moments.of(x_NH.double(), y_NG.double()).similarity()


def state_similarity(x_NH: Tensor, y_NG: Tensor, groups_N: np.ndarray, seed: int) -> Estimate:
    """Returns the similarity of two sets of states at the same positions, see `pwcca`. groups_N: the text of each
    position. seed: that of the shuffles."""
    x_NH, y_NG = x_NH.double(), y_NG.double()
    moments, blocks_N = _Moments.of(x_NH, y_NG), torch.from_numpy(blocks_of(groups_N)).to(x_NH.device)
    blocks = int(blocks_N.max()) + 1
    without = [
        moments.without(_Moments.of(x_NH[blocks_N == block], y_NG[blocks_N == block])).similarity()
        for block in range(blocks if blocks > 1 else 0)
    ]
    shuffled = [
        moments._replace(xy_HG=x_NH.T @ y_NG[torch.from_numpy(order_N).to(y_NG.device)]).similarity()
        for order_N in _shuffles(len(x_NH), seed)
    ]
    return _estimate(moments.similarity(), without, shuffled)


# --- all layers of a model, and several models --------------------------------------------------------------------


def evolution(
    layers: tuple[int, ...],
    read: LabeledStates,
    predicted: LabeledStates | None,
    clusters: int,
    seed: int,
    progress: Callable[[], None],
) -> list[dict[str, object]]:
    """Returns, for each layer, its number `layer`; `input` and `predicted`, the information on the token at a position
    and on the token that is predicted there; and `before`, the similarity to the layer before. None if there is none.

    read, predicted: states with the tokens at their positions, and with the tokens that are predicted there; None for a
    model that predicts none. progress: called after each layer.
    """

    def information(labeled: LabeledStates | None, index: int) -> dict[str, float] | None:
        if labeled is None:
            return None
        labels_N = labeled.labels_N.cpu().numpy()
        return asdict(token_information(labeled.states_WNH[index], labels_N, labeled.groups_N, clusters, seed))

    rows: list[dict[str, object]] = []
    for index, layer in enumerate(layers):
        before = None
        if index:
            below_NH, states_NH = read.states_WNH[index - 1], read.states_WNH[index]
            before = asdict(state_similarity(below_NH, states_NH, read.groups_N, seed))
        informed = {"input": information(read, index), "predicted": information(predicted, index)}
        rows.append({"layer": layer, **informed, "before": before})
        progress()
    return rows
