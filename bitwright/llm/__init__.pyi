from bitwright.llm.files.common import tokenizer_files as tokenizer_files
from bitwright.llm.files.table import FILE_FORMATS as FILE_FORMATS
from bitwright.llm.files.table import check_checkpoint as check_checkpoint
from bitwright.llm.files.table import read_checkpoint as read_checkpoint
from bitwright.llm.files.table import write_checkpoint as write_checkpoint
from bitwright.llm.packed import FloatWeight as FloatWeight
from bitwright.llm.packed import PackedWeight as PackedWeight
from bitwright.llm.packed import packed_weights as packed_weights
