/* CPUID without integer dot products, so that a library takes the kernels of CPUs that have none.
 *
 * arch_prctl(ARCH_SET_CPUID, 0) makes the instruction fault (Intel "CPUID faulting", flag cpuid_fault); the handler executes
 * it and clears AVX-512, VNNI and AMX. Results of other instructions are those of the CPU.
 */
#define _GNU_SOURCE
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#define SET_CPUID 0x1012

static struct sigaction before;

static int faulting(int on) { return (int)syscall(SYS_arch_prctl, SET_CPUID, (unsigned long)!on); }

static void answer(int number, siginfo_t *info, void *context) {
  (void)number; (void)info;
  greg_t *r = ((ucontext_t *)context)->uc_mcontext.gregs;
  unsigned char *at = (unsigned char *)r[REG_RIP];
  if (at[0] != 0x0f || at[1] != 0xa2) { sigaction(SIGSEGV, &before, 0); return; }
  uint32_t leaf = (uint32_t)r[REG_RAX], sub = (uint32_t)r[REG_RCX], a, b, c, d;
  faulting(0);
  __asm__ volatile("cpuid" : "=a"(a), "=b"(b), "=c"(c), "=d"(d) : "a"(leaf), "c"(sub));
  faulting(1);
  if (leaf == 7 && sub == 0) {
    b &= ~((1u << 16) | (1u << 17) | (1u << 21) | (1u << 28) | (1u << 30) | (1u << 31)); /* AVX-512 F DQ IFMA CD BW VL */
    c &= ~((1u << 1) | (1u << 6) | (1u << 11) | (1u << 12) | (1u << 14));                /* VBMI, VBMI2, VNNI, ... */
    d &= ~((1u << 22) | (1u << 23) | (1u << 24) | (1u << 25));                           /* AMX, FP16 */
  }
  if (leaf == 7 && sub == 1) { a &= ~((1u << 4) | (1u << 5) | (1u << 21) | (1u << 23)); d = 0; } /* AVX-VNNI, ... */
  r[REG_RAX] = a; r[REG_RBX] = b; r[REG_RCX] = c; r[REG_RDX] = d;
  r[REG_RIP] += 2;
}

int without_vnni(void) {
  struct sigaction action;
  memset(&action, 0, sizeof action);
  action.sa_sigaction = answer;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigaction(SIGSEGV, &action, &before);
  return faulting(1);
}
