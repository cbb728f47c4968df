// Includes the unmodified source FOLDER/KERNEL.cu, in a namespace per kernel.
#include "cuda.h"

#define TEXT(x) #x
// clang-format off: the text of a path has no spaces
#define FILE_OF(folder, name) TEXT(folder/name.cu)
// clang-format on
namespace KERNEL {
#include FILE_OF(FOLDER, KERNEL)
}
