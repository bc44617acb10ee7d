#include "attention/cpu/kernel.inl"

namespace crumb::cpu {

const Kernel amx_kernel = kKernel;

}  // namespace crumb::cpu
