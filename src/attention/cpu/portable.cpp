#include "attention/cpu/kernel.inl"

namespace crumb::cpu {

const Kernel portable_kernel = kKernel;

}  // namespace crumb::cpu
