"""Why a layer makes much error, and which remedies help: each is tried and measured before it is named.

The remedies are methods of ``bitwright.methods`` and ``bitwright.algorithms``.
"""
