from bitwright.analysis.analyze import analyze as analyze
from bitwright.analysis.layer_outputs import LayerOutputUtil as LayerOutputUtil
from bitwright.core.numerics.formats import FloatFormat as FloatFormat
from bitwright.core.numerics.formats import IntFormat as IntFormat
from bitwright.core.numerics.granularity import PerBlock as PerBlock
from bitwright.core.numerics.granularity import PerChannel as PerChannel
from bitwright.core.numerics.granularity import PerGate as PerGate
from bitwright.core.numerics.granularity import PerTensor as PerTensor
from bitwright.core.numerics.spec import PRESETS as PRESETS
from bitwright.core.numerics.spec import Preset as Preset
from bitwright.core.numerics.spec import QuantSpec as QuantSpec
from bitwright.core.numerics.spec import RangeMethod as RangeMethod
from bitwright.core.placement.rules import Rule as Rule
from bitwright.errors import BitwrightError as BitwrightError
from bitwright.errors import BusyError as BusyError
from bitwright.errors import CalibrationError as CalibrationError
from bitwright.errors import ConfigError as ConfigError
from bitwright.errors import EncodingsError as EncodingsError
from bitwright.errors import ExportError as ExportError
from bitwright.errors import FormatError as FormatError
from bitwright.errors import GranularityError as GranularityError
from bitwright.errors import ModelError as ModelError
from bitwright.errors import RangeError as RangeError
from bitwright.methods.pipeline import quantize as quantize
from bitwright.mixed.auto import auto_quantize as auto_quantize
from bitwright.mixed.search import mixed_precision as mixed_precision

__version__: str
