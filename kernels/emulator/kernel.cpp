// A kernel's source, as it is. KERNEL is its name, in FOLDER; the namespace keeps it apart from the other kernels.
#include "cuda.h"

#define TEXT(x) #x
#define FILE_OF(folder, name) TEXT(folder/name.cu)
namespace KERNEL {
#include FILE_OF(FOLDER, KERNEL)
}
