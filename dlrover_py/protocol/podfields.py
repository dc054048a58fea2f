"""The fields of a Pod template, by type: made by ``python scripts/pod_fields.py --write``.

Source: the models of the Python package ``kubernetes`` 37.0.2. A field is written as
``name`` (text), ``name:Type``, ``name:[Type]``, ``name:[]`` (a list of texts), ``name:{}`` (a
mapping of texts with keys of any name) or ``name:any``. Texts are replaced by ``int``, ``bool`` or
``quantity`` where the type is another one.
"""

from typing import Final

FIELDS: Final[dict[str, str]] = {
    "AWSElasticBlockStoreVolumeSource": "fsType partition:int readOnly:bool volumeID",
    "Affinity": "nodeAffinity:NodeAffinity podAffinity:PodAffinity podAntiAffinity:PodAntiAffinity",
    "AppArmorProfile": "localhostProfile type",
    "AzureDiskVolumeSource": "cachingMode diskName diskURI fsType kind readOnly:bool",
    "AzureFileVolumeSource": "readOnly:bool secretName shareName",
    "CSIVolumeSource": (
        "driver fsType nodePublishSecretRef:LocalObjectReference readOnly:bool volumeAttributes:{}"
    ),
    "Capabilities": "add:[] drop:[]",
    "CephFSVolumeSource": (
        "monitors:[] path readOnly:bool secretFile secretRef:LocalObjectReference user"
    ),
    "CinderVolumeSource": "fsType readOnly:bool secretRef:LocalObjectReference volumeID",
    "ClusterTrustBundleProjection": (
        "labelSelector:LabelSelector name optional:bool path signerName user:int"
    ),
    "ConfigMapEnvSource": "name optional:bool",
    "ConfigMapKeySelector": "key name optional:bool",
    "ConfigMapProjection": "items:[KeyToPath] name optional:bool",
    "ConfigMapVolumeSource": "defaultMode:int defaultUser:int items:[KeyToPath] name optional:bool",
    "Container": (
        "args:[] command:[] env:[EnvVar] envFrom:[EnvFromSource] image imagePullPolicy "
        "lifecycle:Lifecycle livenessProbe:Probe name ports:[ContainerPort] readinessProbe:Probe "
        "resizePolicy:[ContainerResizePolicy] resources:ResourceRequirements restartPolicy "
        "restartPolicyRules:[ContainerRestartRule] securityContext:SecurityContext "
        "startupProbe:Probe stdin:bool stdinOnce:bool terminationMessagePath "
        "terminationMessagePolicy tty:bool volumeDevices:[VolumeDevice] "
        "volumeMounts:[VolumeMount] workingDir"
    ),
    "ContainerPort": "containerPort:int hostIP hostPort:int name protocol",
    "ContainerResizePolicy": "resourceName restartPolicy",
    "ContainerRestartRule": "action exitCodes:ContainerRestartRuleOnExitCodes",
    "ContainerRestartRuleOnExitCodes": "operator values:[int]",
    "CoreV1ResourceClaim": "name request",
    "DownwardAPIProjection": "items:[DownwardAPIVolumeFile]",
    "DownwardAPIVolumeFile": (
        "fieldRef:ObjectFieldSelector mode:int path resourceFieldRef:ResourceFieldSelector user:int"
    ),
    "DownwardAPIVolumeSource": "defaultMode:int defaultUser:int items:[DownwardAPIVolumeFile]",
    "EmptyDirVolumeSource": "medium mode:int sizeLimit:quantity",
    "EnvFromSource": "configMapRef:ConfigMapEnvSource prefix secretRef:SecretEnvSource",
    "EnvVar": "name value valueFrom:EnvVarSource",
    "EnvVarSource": (
        "configMapKeyRef:ConfigMapKeySelector fieldRef:ObjectFieldSelector "
        "fileKeyRef:FileKeySelector resourceFieldRef:ResourceFieldSelector "
        "secretKeyRef:SecretKeySelector"
    ),
    "EphemeralContainer": (
        "args:[] command:[] env:[EnvVar] envFrom:[EnvFromSource] image imagePullPolicy "
        "lifecycle:Lifecycle livenessProbe:Probe name ports:[ContainerPort] readinessProbe:Probe "
        "resizePolicy:[ContainerResizePolicy] resources:ResourceRequirements restartPolicy "
        "restartPolicyRules:[ContainerRestartRule] securityContext:SecurityContext "
        "startupProbe:Probe stdin:bool stdinOnce:bool targetContainerName terminationMessagePath "
        "terminationMessagePolicy tty:bool volumeDevices:[VolumeDevice] "
        "volumeMounts:[VolumeMount] workingDir"
    ),
    "EphemeralVolumeSource": "volumeClaimTemplate:PersistentVolumeClaimTemplate",
    "EvictionResponder": "name priority:int",
    "ExecAction": "command:[]",
    "FCVolumeSource": "fsType lun:int readOnly:bool targetWWNs:[] wwids:[]",
    "FileKeySelector": "key optional:bool path volumeName",
    "FlexVolumeSource": "driver fsType options:{} readOnly:bool secretRef:LocalObjectReference",
    "FlockerVolumeSource": "datasetName datasetUUID",
    "GCEPersistentDiskVolumeSource": "fsType partition:int pdName readOnly:bool",
    "GRPCAction": "mode port:int service",
    "GitRepoVolumeSource": "directory repository revision",
    "GlusterfsVolumeSource": "endpoints path readOnly:bool",
    "HTTPGetAction": "host httpHeaders:[HTTPHeader] path port:any protocol scheme",
    "HTTPHeader": "name value",
    "HostAlias": "hostnames:[] ip",
    "HostPathVolumeSource": "path type",
    "ISCSIVolumeSource": (
        "chapAuthDiscovery:bool chapAuthSession:bool fsType initiatorName iqn iscsiInterface "
        "lun:int portals:[] readOnly:bool secretRef:LocalObjectReference targetPortal"
    ),
    "ImageVolumeSource": "pullPolicy reference",
    "KeyToPath": "key mode:int path user:int",
    "LabelSelector": "matchExpressions:[LabelSelectorRequirement] matchLabels:{}",
    "LabelSelectorRequirement": "key operator values:[]",
    "Lifecycle": "postStart:LifecycleHandler preStop:LifecycleHandler stopSignal",
    "LifecycleHandler": (
        "exec:ExecAction httpGet:HTTPGetAction sleep:SleepAction tcpSocket:TCPSocketAction"
    ),
    "LocalObjectReference": "name",
    "ManagedFieldsEntry": "apiVersion fieldsType fieldsV1:any manager operation subresource time",
    "NFSVolumeSource": "path readOnly:bool server",
    "NodeAffinity": (
        "preferredDuringSchedulingIgnoredDuringExecution:[PreferredSchedulingTerm] "
        "requiredDuringSchedulingIgnoredDuringExecution:NodeSelector"
    ),
    "NodeSelector": "nodeSelectorTerms:[NodeSelectorTerm]",
    "NodeSelectorRequirement": "key operator values:[]",
    "NodeSelectorTerm": (
        "matchExpressions:[NodeSelectorRequirement] matchFields:[NodeSelectorRequirement]"
    ),
    "ObjectFieldSelector": "apiVersion fieldPath",
    "ObjectMeta": (
        "annotations:{} creationTimestamp deletionGracePeriodSeconds:int deletionTimestamp "
        "finalizers:[] generateName generation:int labels:{} managedFields:[ManagedFieldsEntry] "
        "name namespace ownerReferences:[OwnerReference] resourceVersion selfLink uid"
    ),
    "OwnerReference": "apiVersion blockOwnerDeletion:bool controller:bool kind name uid",
    "PersistentVolumeClaimSpec": (
        "accessModes:[] dataSource:TypedLocalObjectReference dataSourceRef:TypedObjectReference "
        "resources:VolumeResourceRequirements selector:LabelSelector storageClassName "
        "volumeAttributesClassName volumeMode volumeName"
    ),
    "PersistentVolumeClaimTemplate": "metadata:ObjectMeta spec:PersistentVolumeClaimSpec",
    "PersistentVolumeClaimVolumeSource": "claimName readOnly:bool",
    "PhotonPersistentDiskVolumeSource": "fsType pdID",
    "PodAffinity": (
        "preferredDuringSchedulingIgnoredDuringExecution:[WeightedPodAffinityTerm] "
        "requiredDuringSchedulingIgnoredDuringExecution:[PodAffinityTerm]"
    ),
    "PodAffinityTerm": (
        "labelSelector:LabelSelector matchLabelKeys:[] mismatchLabelKeys:[] "
        "namespaceSelector:LabelSelector namespaces:[] topologyKey"
    ),
    "PodAntiAffinity": (
        "preferredDuringSchedulingIgnoredDuringExecution:[WeightedPodAffinityTerm] "
        "requiredDuringSchedulingIgnoredDuringExecution:[PodAffinityTerm]"
    ),
    "PodCertificateProjection": (
        "certificateChainPath credentialBundlePath keyPath keyType maxExpirationSeconds:int "
        "signerName user:int userAnnotations:{}"
    ),
    "PodDNSConfig": "nameservers:[] options:[PodDNSConfigOption] searches:[]",
    "PodDNSConfigOption": "name value",
    "PodOS": "name",
    "PodReadinessGate": "conditionType",
    "PodResourceClaim": "name resourceClaimName resourceClaimTemplateName",
    "PodSchedulingGate": "name",
    "PodSchedulingGroup": "podGroupName",
    "PodSecurityContext": (
        "appArmorProfile:AppArmorProfile fsGroup:int fsGroupChangePolicy runAsGroup:int "
        "runAsNonRoot:bool runAsUser:int seLinuxChangePolicy seLinuxOptions:SELinuxOptions "
        "seccompProfile:SeccompProfile supplementalGroups:[int] supplementalGroupsPolicy "
        "sysctls:[Sysctl] windowsOptions:WindowsSecurityContextOptions"
    ),
    "PodSpec": (
        "activeDeadlineSeconds:int affinity:Affinity automountServiceAccountToken:bool "
        "containers:[Container] dnsConfig:PodDNSConfig dnsPolicy enableServiceLinks:bool "
        "ephemeralContainers:[EphemeralContainer] evictionResponders:[EvictionResponder] "
        "hostAliases:[HostAlias] hostIPC:bool hostNetwork:bool hostPID:bool hostUsers:bool "
        "hostname hostnameOverride imagePullSecrets:[LocalObjectReference] "
        "initContainers:[Container] nodeName nodeSelector:{} os:PodOS overhead:{quantity} "
        "preemptionPolicy priority:int priorityClassName readinessGates:[PodReadinessGate] "
        "resourceClaims:[PodResourceClaim] resources:ResourceRequirements restartPolicy "
        "runtimeClassName schedulerName schedulingGates:[PodSchedulingGate] "
        "schedulingGroup:PodSchedulingGroup securityContext:PodSecurityContext serviceAccount "
        "serviceAccountName setHostnameAsFQDN:bool shareProcessNamespace:bool subdomain "
        "terminationGracePeriodSeconds:int tolerations:[Toleration] "
        "topologySpreadConstraints:[TopologySpreadConstraint] volumes:[Volume]"
    ),
    "PodTemplateSpec": "metadata:ObjectMeta spec:PodSpec",
    "PortworxVolumeSource": "fsType readOnly:bool volumeID",
    "PreferredSchedulingTerm": "preference:NodeSelectorTerm weight:int",
    "Probe": (
        "exec:ExecAction failureThreshold:int grpc:GRPCAction httpGet:HTTPGetAction "
        "initialDelaySeconds:int periodSeconds:int successThreshold:int tcpSocket:TCPSocketAction "
        "terminationGracePeriodSeconds:int timeoutSeconds:int"
    ),
    "ProjectedVolumeSource": "defaultMode:int defaultUser:int sources:[VolumeProjection]",
    "QuobyteVolumeSource": "group readOnly:bool registry tenant user volume",
    "RBDVolumeSource": (
        "fsType image keyring monitors:[] pool readOnly:bool secretRef:LocalObjectReference user"
    ),
    "ResourceFieldSelector": "containerName divisor:quantity resource",
    "ResourceRequirements": "claims:[CoreV1ResourceClaim] limits:{quantity} requests:{quantity}",
    "SELinuxOptions": "level role type user",
    "ScaleIOVolumeSource": (
        "fsType gateway protectionDomain readOnly:bool secretRef:LocalObjectReference "
        "sslEnabled:bool storageMode storagePool system volumeName"
    ),
    "SeccompProfile": "localhostProfile type",
    "SecretEnvSource": "name optional:bool",
    "SecretKeySelector": "key name optional:bool",
    "SecretProjection": "items:[KeyToPath] name optional:bool",
    "SecretVolumeSource": (
        "defaultMode:int defaultUser:int items:[KeyToPath] optional:bool secretName"
    ),
    "SecurityContext": (
        "allowPrivilegeEscalation:bool appArmorProfile:AppArmorProfile capabilities:Capabilities "
        "privileged:bool procMount readOnlyRootFilesystem:bool runAsGroup:int runAsNonRoot:bool "
        "runAsUser:int seLinuxOptions:SELinuxOptions seccompProfile:SeccompProfile "
        "windowsOptions:WindowsSecurityContextOptions"
    ),
    "ServiceAccountTokenProjection": "audience expirationSeconds:int path user:int",
    "SleepAction": "seconds:int",
    "StorageOSVolumeSource": (
        "fsType readOnly:bool secretRef:LocalObjectReference volumeName volumeNamespace"
    ),
    "Sysctl": "name value",
    "TCPSocketAction": "host port:any",
    "Toleration": "effect key operator tolerationSeconds:int value",
    "TopologySpreadConstraint": (
        "labelSelector:LabelSelector matchLabelKeys:[] maxSkew:int minDomains:int "
        "nodeAffinityPolicy nodeTaintsPolicy topologyKey whenUnsatisfiable"
    ),
    "TypedLocalObjectReference": "apiGroup kind name",
    "TypedObjectReference": "apiGroup kind name namespace",
    "Volume": (
        "awsElasticBlockStore:AWSElasticBlockStoreVolumeSource azureDisk:AzureDiskVolumeSource "
        "azureFile:AzureFileVolumeSource cephfs:CephFSVolumeSource cinder:CinderVolumeSource "
        "configMap:ConfigMapVolumeSource csi:CSIVolumeSource downwardAPI:DownwardAPIVolumeSource "
        "emptyDir:EmptyDirVolumeSource ephemeral:EphemeralVolumeSource fc:FCVolumeSource "
        "flexVolume:FlexVolumeSource flocker:FlockerVolumeSource "
        "gcePersistentDisk:GCEPersistentDiskVolumeSource gitRepo:GitRepoVolumeSource "
        "glusterfs:GlusterfsVolumeSource hostPath:HostPathVolumeSource image:ImageVolumeSource "
        "iscsi:ISCSIVolumeSource name nfs:NFSVolumeSource "
        "persistentVolumeClaim:PersistentVolumeClaimVolumeSource "
        "photonPersistentDisk:PhotonPersistentDiskVolumeSource "
        "portworxVolume:PortworxVolumeSource projected:ProjectedVolumeSource "
        "quobyte:QuobyteVolumeSource rbd:RBDVolumeSource scaleIO:ScaleIOVolumeSource "
        "secret:SecretVolumeSource storageos:StorageOSVolumeSource "
        "vsphereVolume:VsphereVirtualDiskVolumeSource"
    ),
    "VolumeDevice": "devicePath name",
    "VolumeMount": (
        "bindMountOptions:[] mountPath mountPropagation name readOnly:bool recursiveReadOnly "
        "subPath subPathExpr"
    ),
    "VolumeProjection": (
        "clusterTrustBundle:ClusterTrustBundleProjection configMap:ConfigMapProjection "
        "downwardAPI:DownwardAPIProjection podCertificate:PodCertificateProjection "
        "secret:SecretProjection serviceAccountToken:ServiceAccountTokenProjection"
    ),
    "VolumeResourceRequirements": "limits:{quantity} requests:{quantity}",
    "VsphereVirtualDiskVolumeSource": "fsType storagePolicyID storagePolicyName volumePath",
    "WeightedPodAffinityTerm": "podAffinityTerm:PodAffinityTerm weight:int",
    "WindowsSecurityContextOptions": (
        "gmsaCredentialSpec gmsaCredentialSpecName hostProcess:bool runAsUserName"
    ),
}
