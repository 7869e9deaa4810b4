"""A contract simulator of the NPU operators of SGLang's unquantised MoE; README.md."""

from tests.support.npu_simulator.contract import ContractError, format_of
from tests.support.npu_simulator.stand_in import install

__all__ = ["ContractError", "format_of", "install"]
