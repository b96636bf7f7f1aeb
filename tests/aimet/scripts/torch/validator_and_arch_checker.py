"""ModelValidator, model preparation and ArchChecker."""

import os

from aimet_torch.arch_checker.arch_checker import ArchChecker
from aimet_torch.model_preparer import prepare_model
from aimet_torch.model_validator.model_validator import ModelValidator
from aimet_torch.quantsim import QuantizationSimModel

from tests.aimet.nets import Net, Residual, batch

assert ModelValidator.validate_model(Net().eval(), model_input=batch())
prepared = prepare_model(Residual().eval())
assert ModelValidator.validate_model(prepared, batch())
sim = QuantizationSimModel(prepared, batch())
sim.compute_encodings(lambda model: model(batch()))

os.makedirs("arch")
ArchChecker.check_model_arch(Net().eval(), batch(), result_dir="./arch")
assert os.listdir("arch") == ["arch_checker_report.html"]
