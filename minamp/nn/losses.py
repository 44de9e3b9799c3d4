"""Losses as modules; the arithmetic stands in minamp/ops/loss.py, cross_entropy.py, likelihood.py and margin_loss.py."""

from minamp.nn import functional as F
from minamp.nn.module import Module
from minamp.ops.margin_loss import check_class_weight, check_margin, check_power


class _Loss(Module):
    def __init__(self, *, reduction="mean"):
        super().__init__()
        self.reduction = reduction


class MSELoss(_Loss):
    """Mean of (input - target)^2."""

    def forward(self, input, target):
        return F.mse_loss(input, target, reduction=self.reduction)


class L1Loss(_Loss):
    """Mean of |input - target|."""

    def forward(self, input, target):
        return F.l1_loss(input, target, reduction=self.reduction)


class SmoothL1Loss(_Loss):
    """Quadratic within `beta` of the target, linear outside."""

    def __init__(self, *, reduction="mean", beta=1.0):
        super().__init__(reduction=reduction)
        self.beta = beta

    def forward(self, input, target):
        return F.smooth_l1_loss(input, target, reduction=self.reduction, beta=self.beta)


class HuberLoss(_Loss):
    """Quadratic within `delta` of the target, linear outside."""

    def __init__(self, reduction="mean", delta=1.0):
        super().__init__(reduction=reduction)
        self.delta = delta

    def forward(self, input, target):
        return F.huber_loss(input, target, reduction=self.reduction, delta=self.delta)


class KLDivLoss(_Loss):
    """Kullback-Leibler divergence of log-probabilities from target probabilities; 'batchmean' is the textbook's mean."""

    def __init__(self, *, reduction="mean", log_target=False):
        super().__init__(reduction=reduction)
        self.log_target = log_target

    def forward(self, input, target):
        return F.kl_div(input, target, reduction=self.reduction, log_target=self.log_target)


class CrossEntropyLoss(_Loss):
    """Cross entropy of logits (N, C, ...) and class indices (N, ...); weight: (C,)."""

    def __init__(self, weight=None, *, ignore_index=-100, reduction="mean", label_smoothing=0.0):
        super().__init__(reduction=reduction)
        self.register_buffer("weight", weight)
        self.ignore_index, self.label_smoothing = ignore_index, label_smoothing

    def forward(self, input, target):
        return F.cross_entropy(
            input,
            target,
            weight=self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
        )


class NLLLoss(_Loss):
    """Negative log likelihood of log-probabilities (N, C, ...) and class indices (N, ...); weight: (C,)."""

    def __init__(self, weight=None, *, ignore_index=-100, reduction="mean"):
        super().__init__(reduction=reduction)
        self.register_buffer("weight", weight)
        self.ignore_index = ignore_index

    def forward(self, input, target):
        return F.nll_loss(
            input, target, weight=self.weight, ignore_index=self.ignore_index, reduction=self.reduction
        )


class BCELoss(_Loss):
    """Cross entropy of probabilities and 0/1 targets; refused under autocast: use BCEWithLogitsLoss."""

    def __init__(self, weight=None, *, reduction="mean"):
        super().__init__(reduction=reduction)
        self.register_buffer("weight", weight)

    def forward(self, input, target):
        return F.binary_cross_entropy(input, target, weight=self.weight, reduction=self.reduction)


class BCEWithLogitsLoss(_Loss):
    """Cross entropy of logits and 0/1 targets; pos_weight weighs the positive ones."""

    def __init__(self, weight=None, *, reduction="mean", pos_weight=None):
        super().__init__(reduction=reduction)
        self.register_buffer("weight", weight)
        self.register_buffer("pos_weight", pos_weight)

    def forward(self, input, target):
        return F.binary_cross_entropy_with_logits(
            input, target, weight=self.weight, pos_weight=self.pos_weight, reduction=self.reduction
        )


# ---------------------------------------------------------------------------------------------------------- likelihoods


class PoissonNLLLoss(_Loss):
    """Negative log likelihood of counts; input: the logarithm of their mean (log_input=False: their mean)."""

    def __init__(self, log_input=True, full=False, *, eps=1e-8, reduction="mean"):
        super().__init__(reduction=reduction)
        self.log_input, self.full, self.eps = log_input, full, eps

    def forward(self, input, target):
        return F.poisson_nll_loss(
            input, target, self.log_input, self.full, eps=self.eps, reduction=self.reduction
        )


class GaussianNLLLoss(_Loss):
    """Negative log likelihood of measurements; input: their mean, var: their variance."""

    def __init__(self, *, full=False, eps=1e-6, reduction="mean"):
        super().__init__(reduction=reduction)
        self.full, self.eps = full, eps

    def forward(self, input, target, var):
        return F.gaussian_nll_loss(input, target, var, self.full, self.eps, self.reduction)


# -------------------------------------------------------------------------------------------------------- with a margin


class SoftMarginLoss(_Loss):
    """log(1 + exp(-target * input)) of logits and targets 1 and -1."""

    def forward(self, input, target):
        return F.soft_margin_loss(input, target, reduction=self.reduction)


class HingeEmbeddingLoss(_Loss):
    """A distance where target is 1, what it lacks of `margin` where it is -1."""

    def __init__(self, margin=1.0, *, reduction="mean"):
        super().__init__(reduction=reduction)
        self.margin = margin

    def forward(self, input, target):
        return F.hinge_embedding_loss(input, target, self.margin, reduction=self.reduction)


class MarginRankingLoss(_Loss):
    """Wants input1 larger than input2 by `margin` where target is 1, and smaller where it is -1."""

    def __init__(self, margin=0.0, *, reduction="mean"):
        super().__init__(reduction=reduction)
        self.margin = margin

    def forward(self, input1, input2, target):
        return F.margin_ranking_loss(input1, input2, target, self.margin, reduction=self.reduction)


class CosineEmbeddingLoss(_Loss):
    """1 - cos of two rows where target is 1, what cos has above `margin` where it is -1."""

    def __init__(self, margin=0.0, *, reduction="mean"):
        super().__init__(reduction=reduction)
        self.margin = margin

    def forward(self, input1, input2, target):
        return F.cosine_embedding_loss(input1, input2, target, self.margin, reduction=self.reduction)


class TripletMarginLoss(_Loss):
    """Wants the negative farther from the anchor than the positive by `margin`; distances are p-norms."""

    def __init__(self, margin=1.0, p=2.0, eps=1e-6, swap=False, *, reduction="mean"):
        check_margin("TripletMarginLoss", margin)
        super().__init__(reduction=reduction)
        self.margin, self.p, self.eps, self.swap = margin, p, eps, swap

    def forward(self, anchor, positive, negative):
        options = {"margin": self.margin, "p": self.p, "eps": self.eps, "swap": self.swap}
        return F.triplet_margin_loss(anchor, positive, negative, **options, reduction=self.reduction)


class TripletMarginWithDistanceLoss(_Loss):
    """TripletMarginLoss with any function of two tensors for a distance, F.pairwise_distance by default."""

    def __init__(self, *, distance_function=None, margin=1.0, swap=False, reduction="mean"):
        check_margin("TripletMarginWithDistanceLoss", margin)
        super().__init__(reduction=reduction)
        self.distance_function = distance_function or F.pairwise_distance
        self.margin, self.swap = margin, swap

    def forward(self, anchor, positive, negative):
        options = {"distance_function": self.distance_function, "margin": self.margin, "swap": self.swap}
        return F.triplet_margin_with_distance_loss(
            anchor, positive, negative, **options, reduction=self.reduction
        )


class MultiMarginLoss(_Loss):
    """Wants the score of the right class above all others by `margin`; weight: (C,)."""

    def __init__(self, p=1, margin=1.0, weight=None, *, reduction="mean"):
        check_power("MultiMarginLoss", p)
        if weight is not None:
            check_class_weight("MultiMarginLoss", weight)
        super().__init__(reduction=reduction)
        self.register_buffer("weight", weight)
        self.p, self.margin = p, margin

    def forward(self, input, target):
        return F.multi_margin_loss(input, target, self.p, self.margin, self.weight, reduction=self.reduction)


class MultiLabelMarginLoss(_Loss):
    """Wants the scores of all labels above all others by 1; a row's labels end at the first -1."""

    def forward(self, input, target):
        return F.multilabel_margin_loss(input, target, reduction=self.reduction)
