#include "attention/cpu/kernel.inl"

namespace crumb::cpu {

const Kernel avx512_kernel = kKernel;

}  // namespace crumb::cpu
