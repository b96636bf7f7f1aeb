from bitwright.analysis.result import Analysis as Analysis
from bitwright.analysis.result import Cause as Cause
from bitwright.analysis.result import LayerRow as LayerRow
from bitwright.analysis.result import SiteRow as SiteRow
from bitwright.metrics.intervals import Difference as Difference
from bitwright.metrics.intervals import compare as compare
