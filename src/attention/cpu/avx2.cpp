#include "attention/cpu/kernel.inl"

namespace crumb::cpu {

const Kernel avx2_kernel = kKernel;

}  // namespace crumb::cpu
