// Compiled once per instruction set: its table of functions.
#include "dot.h"
#include "kernels.h"
#include "packed_linear.h"

#define REGARD_STRING_OF(x) #x
#define REGARD_STRING(x) REGARD_STRING_OF(x)

namespace regard::REGARD_ISA {

extern const Kernels kernels;
const Kernels kernels = {
    REGARD_STRING(REGARD_ISA),
    dot_forward,
    dot_backward,
    dot_jvp,
    dot_statistics,
    dot_weights,
    dot_map,
    linear_forward,
    linear_backward,
    packed_size,
    packed_linear,
};

}  // namespace regard::REGARD_ISA
