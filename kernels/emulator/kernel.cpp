// A kernel's source, as it is. KERNEL is its name; the namespace keeps it apart from the other kernels.
#include "cuda.h"

#define TEXT(x) #x
#define FILE_OF(x) TEXT(../x.cu)
namespace KERNEL {
#include FILE_OF(KERNEL)
}
