"""``aimet_torch.experimental.export``: not here; importing it says what to do instead."""

from bitwright.aimet_common.absent import refuse

refuse(__name__)
