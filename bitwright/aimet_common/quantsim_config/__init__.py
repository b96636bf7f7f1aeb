"""``aimet_common.quantsim_config``: the shipped configurations."""
