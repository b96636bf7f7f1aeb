"""``aimet_torch.visualize_serialized_data``: not here; importing it says what to do instead."""

from bitwright.aimet_common.absent import refuse

refuse(__name__)
