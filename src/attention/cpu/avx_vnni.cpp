#include "attention/cpu/kernel.inl"

namespace crumb::cpu {

const Kernel avx_vnni_kernel = kKernel;

}  // namespace crumb::cpu
