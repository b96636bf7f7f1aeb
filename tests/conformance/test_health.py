"""The doctors of both front ends on models with a planted fault, and on models that only look faulty."""

from __future__ import annotations

import json

import pytest

from bitwright.core.diagnosis import REMEDIES
from tests.health_zoo import FAULTS, LOOK_ALIKES, check


def params(table):
    return [
        pytest.param(front, case, id=f"{front}: {case.name}")
        for front, cases in table.items()
        for case in cases
    ]


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@pytest.mark.parametrize("front, case", params(FAULTS))
def test_the_planted_operator_is_named(front, case):
    report = check(front, case)
    culprit = report.culprit
    assert culprit is not None and not report.ok and report.exit_code == 1, report
    assert case.op in f"{culprit.where} {culprit.op}" if front == "torch" else case.op == culprit.op, report
    assert culprit.cause == case.cause and culprit.remedy == REMEDIES[case.cause], report
    assert case.where in culprit.where and case.problem in culprit.problem, report
    assert case.line in (culprit.source or ""), report
    assert case.batch is None or culprit.batch == case.batch, report
    assert case.sample is None or culprit.sample == case.sample, report
    assert json.loads(report.to_json())["culprits"][0]["op"] == culprit.op


@pytest.mark.parametrize("front, case", params(LOOK_ALIKES))
def test_what_only_looks_like_a_fault_is_not_accused(front, case):
    report = check(front, case)
    assert report.ok and report.exit_code == 0, report


def test_there_are_as_many_cases_as_promised():
    assert sum(map(len, FAULTS.values())) >= 50 and min(map(len, FAULTS.values())) >= 25
    assert min(map(len, LOOK_ALIKES.values())) >= 12
    for cases in (*FAULTS.values(), *LOOK_ALIKES.values()):
        assert len({case.name for case in cases}) == len(cases)
