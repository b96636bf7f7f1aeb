from aimet_common.defs import CallbackFunc as Callback
from aimet_common.utils import CallbackFunc
from aimet_torch.amp.mixed_precision_algo import EvalCallbackFactory
from aimet_torch.mixed_precision import EvalCallbackFactory as Factory
from aimet_torch.quantization.affine import AffineEncoding
from torch import tensor

assert CallbackFunc is Callback and EvalCallbackFactory is Factory
assert AffineEncoding(tensor(0.1), tensor(0.0), 8).zero_point_shift == 0.0
