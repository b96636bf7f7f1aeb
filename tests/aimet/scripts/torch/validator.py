import torch
from aimet_torch.model_validator.model_validator import ModelValidator

from tests.aimet.nets import Residual

assert ModelValidator.validate_model(Residual(), model_input=torch.randn(1, 3, 8, 8))
