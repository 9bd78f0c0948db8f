"""Calibrations of a file on the device: each request by its class, whatever form the classes have."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dspark.host.schedule import CalibrationClasses
from dspark.scheduler.calibration import Calibration, Curves, confidence_of
from dspark.scheduler.sts_file import StsTable
from tests.compare import FLOAT_32, assert_close

GAMMA = 3
PLAIN = Calibration(np.array([0.5, 1.0, 2.0]))
BENT = Calibration(
    np.array([1.5, 0.7, 1.0]),
    Curves(np.array([[-2.0, 0.0, 1.0, 4.0]] * GAMMA), np.array([[-3.0, -1.0, 1.0, 1.5]] * GAMMA)),
)


@pytest.mark.parametrize("classes", [(), ((0.0, BENT),), ((0.0, PLAIN), (1.0, BENT)), ((0.0, PLAIN), (1.0, PLAIN))])
def test_confidences_are_those_of_the_file(classes: tuple[tuple[float, Calibration], ...]) -> None:
    served = CalibrationClasses(StsTable(PLAIN, classes, "", 0, None), "cpu")
    logits = torch.tensor([[-9.0, 0.1, 3.0], [-1.0, 0.0, 90.0]])
    for temperature, nearest in ((0.0, 0), (0.4, 0), (0.6, -1), (2.0, -1)):
        calibration = classes[nearest][1] if classes else PLAIN
        row = torch.full((2,), served.of(temperature))
        required = confidence_of(logits.numpy(), calibration)
        assert_close(served.scale(logits, row), required, FLOAT_32, f"temperature {temperature}")
