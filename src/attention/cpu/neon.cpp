#include "attention/cpu/kernel.inl"

namespace crumb::cpu {

const Kernel neon_kernel = kKernel;

}  // namespace crumb::cpu
