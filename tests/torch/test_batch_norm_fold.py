"""``fold_all_batch_norms`` for torch: its arguments, and models whose code leans on what folding changes."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bitwright.errors import ModelError
from bitwright.torch import fold_all_batch_norms
from tests.support.cases import settle
from tests.support.folding_zoo import IMAGE, Wired, bn, conv, point, row


class TwoPaddings(nn.Module):
    """One weight, called with two paddings behind one batch norm."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x):
        y, w, b = self.bn(x), self.conv.weight, self.conv.bias
        return F.conv2d(y, w, b).mean((2, 3)) + F.conv2d(y, w, b, padding=1).mean((2, 3))


def conv_and_bn(wiring):
    return lambda: Wired(wiring, conv=point(), bn=bn(4))


def shares_memory():
    model = row(point(), bn(4), nn.ReLU(), point())
    model[3].weight = nn.Parameter(model[0].weight.data)
    return model


def reads_statistics(m, x):
    return F.batch_norm(m.bn(m.conv(x)).relu(), m.bn.running_mean, m.bn.running_var)


REFUSED = {
    "weight-transposed-elsewhere": (
        lambda: Wired(
            lambda m, x: F.linear(F.relu(m.bn(m.fc(x.mean((2, 3))))), m.fc.weight.t()),
            fc=nn.Linear(4, 6),
            bn=nn.BatchNorm1d(6),
        ),
        "linear reads a value computed from fc.weight",
    ),
    "two-paddings": (TwoPaddings, "the runs of conv differ in their parameters or attributes"),
    "norm-weight-in-a-sum": (
        conv_and_bn(lambda m, x: m.bn(m.conv(x)) * m.bn.weight.abs().sum()),
        "reads a value computed from bn.weight",
    ),
    "statistics-read-elsewhere": (conv_and_bn(reads_statistics), "batch_norm also reads bn.running_mean"),
    "attribute-of-the-norm": (
        conv_and_bn(lambda m, x: m.bn(m.conv(x))[:, : m.bn.num_features]),
        "with it folded, the model fails: AttributeError: 'Identity' object has no attribute 'num_features'",
    ),
    "value-leaves-torch": (
        conv_and_bn(lambda m, x: m.bn(y := m.conv(x)) * y.tolist()[0][0][0][0]),
        "with it folded, output agrees with the original to ",
    ),
    "weights-share-memory": (shares_memory, "with it folded, output agrees with the original to "),
    "hook-changes-the-value": (
        lambda: (m := row(point(), bn(4)))[0].register_forward_hook(lambda _, args, out: out * 2) and m,
        "its input comes from ",
    ),
    "dropout-that-always-drops": (
        conv_and_bn(lambda m, x: m.bn(F.dropout(m.conv(x), 0.3))),
        "its input comes from dropout (Dropout)",
    ),
}


def settled(build):
    model = settle(build(), IMAGE)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            nn.init.uniform_(module.weight, 0.5, 2)
            nn.init.normal_(module.bias)
    return model


def image(seed):
    return IMAGE(torch.Generator().manual_seed(seed)).args[0]


def run(model, seed):
    torch.manual_seed(0)
    with torch.no_grad():
        return model(image(seed))


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_fold_may_break_is_refused_with_the_reason(name):
    build, reason = REFUSED[name]
    model = settled(build)
    before = run(model, 5)
    report = fold_all_batch_norms(model, dummy_input=image(1))
    assert not report and any(reason in text for _, text in report.skipped), str(report)
    assert torch.equal(run(model, 5), before)


def test_one_norm_that_is_needed_does_not_keep_the_others():
    parts = {f"c{i}": point() for i in range(6)} | {f"b{i}": bn(4) for i in range(6)}

    def wiring(m, x):
        for i in range(6):
            x = F.relu(getattr(m, f"b{i}")(getattr(m, f"c{i}")(x)))
        return x[:, : m.b3.num_features]

    model = settled(lambda: Wired(wiring, **parts))
    before = run(model, 5)
    report = fold_all_batch_norms(model, dummy_input=image(1))
    assert len(report) == 5 and [name for name, _ in report.skipped] == ["b3"]
    assert torch.allclose(run(model, 5), before, rtol=1e-3, atol=1e-4)


def test_infinite_outputs_do_not_stand_against_a_fold():
    model = settled(conv_and_bn(lambda m, x: m.bn(m.conv(x)).masked_fill(x > 1, -torch.inf)))
    assert len(fold_all_batch_norms(model, dummy_input=image(1))) == 1


def test_input_shapes_may_be_given_instead_of_an_input():
    for shapes in ((2, 4, 8, 8), [(2, 4, 8, 8)]):
        assert list(fold_all_batch_norms(row(conv(), bn()).eval(), shapes)) == [("0", "1")]


def test_neither_shapes_nor_input_is_an_error():
    with pytest.raises(ModelError, match=r"neither dummy_input nor input_shapes.*pass dummy_input=x"):
        fold_all_batch_norms(row(conv(), bn()))


def test_modes_and_dtypes_stay():
    model = row(conv(), bn()).double().train()
    assert len(fold_all_batch_norms(model, (2, 4, 8, 8))) == 1
    assert model.training and model[1].training and model[0].weight.dtype == torch.float64


def test_layers_of_several_dtypes():
    model = Wired(
        lambda m, x: m.q(m.b(m.p(m.a(x)).double())), a=conv(), p=bn(), b=conv(6, 4).double(), q=bn(4).double()
    ).eval()
    before = run(model, 2)
    assert len(fold_all_batch_norms(model, dummy_input=image(1))) == 2
    assert torch.allclose(run(model, 2), before, atol=1e-5)
