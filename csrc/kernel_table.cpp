// Compiled once per instruction set: its table of functions.
#include "kernels.h"

#define REGARD_STRING_OF(x) #x
#define REGARD_STRING(x) REGARD_STRING_OF(x)

#if defined(__AMX_BF16__)
namespace regard::avx512bf16 {
int packed_linear(const regard_packed_linear&);
}
#endif

namespace regard::REGARD_ISA {

#ifdef REGARD_EXTENDS
// A kernel that is not declared here is that of the other instruction set.
using namespace REGARD_EXTENDS;
int dot_forward(const regard_dot&, const regard_dot_result&);
int dot_backward(const regard_dot&, const regard_dot_gradient&);
#if defined(__AMX_BF16__)
using avx512bf16::packed_linear;
#elif defined(__AVX512BF16__)
int packed_linear(const regard_packed_linear&);
#endif
#else
REGARD_KERNELS(REGARD_DECLARE_KERNEL)
#endif

extern const Kernels kernels;
const Kernels kernels = {REGARD_STRING(REGARD_ISA),
#define REGARD_NAME(result, name, parameters) name,
                         REGARD_KERNELS(REGARD_NAME)
#undef REGARD_NAME
};

}  // namespace regard::REGARD_ISA
